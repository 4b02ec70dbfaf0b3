"""The native build has its own HeadTemplate: it finds what the plain one does."""

from importlib.util import module_from_spec, spec_from_file_location

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.request import CONTROLS, CONTROLS_AND_SPACES, COUNT
from omni_proxy.wire.scan.head_template import HeadTemplate
from tests.tree import PACKAGE

SPEC = spec_from_file_location("plain_head_template", PACKAGE / "wire/scan/head_template.py")
PLAIN = module_from_spec(SPEC)
SPEC.loader.exec_module(PLAIN)

TEXTS = st.lists(
    st.sampled_from([b"a: ", b"\r\n", b"\r", b"\n", b"x", b"", b" ", b"12", b"\t", b"\x7f", b"\xe9", b"\0"]),
    max_size=4,
).map(b"".join)  # fmt: skip
FORBIDDEN = st.sampled_from([CONTROLS, CONTROLS_AND_SPACES, COUNT])
STEPS = st.lists(st.tuples(TEXTS.filter(bool), FORBIDDEN, st.none() | TEXTS), max_size=3)


@given(
    TEXTS,
    STEPS,
    TEXTS,
    st.lists(TEXTS, max_size=3),
    TEXTS,
    st.sampled_from([b"12", b"1", b"", None]),
)
def test_both_implementations_match_the_same_heads(first, steps, last, values, noise, length):
    parts = tuple((same, len(same), forbidden, after) for same, forbidden, after in steps)
    options = {"counted": True, "id_index": -1}
    last += b"\r\n"
    current = HeadTemplate(first, parts, last, **options)
    plain = PLAIN.HeadTemplate(first, parts, last, **options)
    values = [*values, b"12", b"x", b"12"]
    written = b"".join(
        same + value + b"\r\n" for (same, *_), value in zip(steps, values, strict=False)
    )
    for head in (written + last, written[:-2] + last, written + last + noise, noise, b""):
        assert current.match(head, length) == plain.match(head, length)


@pytest.mark.parametrize("template", [HeadTemplate, PLAIN.HeadTemplate])
def test_a_step_without_a_text_is_refused(template):
    with pytest.raises(ValueError, match="step"):
        template(b"", ((b"", 0, CONTROLS, None),), b"\r\n", counted=True, id_index=-1)


@pytest.mark.parametrize("template", [HeadTemplate, PLAIN.HeadTemplate])
def test_a_template_without_a_blank_line_is_refused(template):
    with pytest.raises(ValueError, match="blank line"):
        template(b"", ((b"a: ", 3, CONTROLS, None),), b"b: 1", counted=True, id_index=-1)
