"""What comments, docstrings and the pages for developers name is there."""

import re

from tests.tree import PACKAGE, ROOT, sources

FILES = {
    path.relative_to(ROOT).as_posix()
    for suffix in ("py", "pyx", "pxd")
    for path in ROOT.glob(f"[!.]*/**/*.{suffix}")
}
MODULES = {path.stem for path in PACKAGE.rglob("*.py")}
PACKAGES = {path.stem for path in PACKAGE.iterdir()}
PAGES = (ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w./*-])((?:\w+/)*\w+\.(?:pyx|pxd|py))\b")
DOTTED = re.compile(r"(?:omni_proxy\.)?(\w+)\.(\w+)(?:\.\w+)*")
NOT_OURS = {"setup.py", "my_policies.py"}  # pip's, and an example for users


def is_there(name: str) -> bool:
    return name in NOT_OURS or any(f"/{path}".endswith(f"/{name}") for path in FILES)


def test_every_file_that_is_named_exists():
    pages = {path: QUOTED.findall(path.read_text()) for path in PAGES}
    compiled = [*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxd")]
    texts = {path: [path.read_text()] for path in [*sources(), *sources(ROOT / "tools"), *compiled]}
    missing = {
        (where.name, name)
        for where, found in (pages | texts).items()
        for text in found
        for name in FILE.findall(text)
        if not is_there(name)
    }
    assert missing == set()


def test_every_module_that_is_quoted_exists():
    texts = {path: path.read_text() for path in sources()}
    # Attributes and keys are written like modules: `fleet.loads`, `server.port`.
    words = {word for text in texts.values() for word in re.findall(r"\w+", QUOTED.sub("", text))}
    words.update(re.findall(r"\w+", (ROOT / "config/example.toml").read_text()))
    missing = {
        (where.name, quoted)
        for where, text in texts.items()
        for quoted in QUOTED.findall(text)
        if (match := DOTTED.fullmatch(quoted)) and match[1] in PACKAGES and match[2] not in words
    }
    assert missing == set()


def test_every_module_that_is_quoted_with_its_class_exists():
    """`membership.CallHandler`: the short form, beside modules of one's own package."""
    quoted = re.compile(r"See `(\w+)\.[A-Z]\w+`")
    named = {(path.name, name) for path in sources() for name in quoted.findall(path.read_text())}
    assert {name for _, name in named} >= {"membership", "peer_counts"}
    assert {each for each in named if each[1] not in MODULES} == set()
