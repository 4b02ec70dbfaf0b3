"""Each cordon reason is spelled in one module, and documented."""

from omni_proxy.fleet import cordon_reasons
from tests.tree import PACKAGE, ROOT, sources

REASONS = {
    text for name, text in vars(cordon_reasons).items() if name.isupper() and isinstance(text, str)
}
# Words with other meanings too, such as the state of a rollout.
AMBIGUOUS = {
    "discovery", "launch", "leaving", "paused", "role", "rollout", "uncertain", "updating",
}  # fmt: skip


def test_the_documentation_explains_every_reason():
    pages = (ROOT / "docs/http.md").read_text() + (ROOT / "docs/operations.md").read_text()
    assert {reason for reason in REASONS if f"`{reason}`" not in pages} == set()


def test_no_other_module_spells_a_reason():
    literals = [f'"{reason}"' for reason in REASONS - AMBIGUOUS]
    assert literals
    spelled = {
        (path.name, literal)
        for path in sources()
        for literal in literals
        if path != PACKAGE / "fleet/cordon_reasons.py" and literal in path.read_text()
    }
    assert spelled == set()
