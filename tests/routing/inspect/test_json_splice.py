import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect import json_splice
from omni_proxy.routing.inspect.json_splice import splice, splice_parts
from omni_proxy.routing.inspect.large_json import walk_members
from omni_proxy.wire.errors import HttpError

NAMES = ("rid", "stream", "max_tokens", "bootstrap_room", "sampling_params")
texts = st.text(max_size=6) | st.sampled_from([
    '"', "\\", '"rid"', "\\u0072id", "{", "}", ",", ":", '","rid":1,"', "\ud800", "\u2028",
])  # fmt: skip
numbers = st.integers() | st.floats()  # NaN and the infinities, too
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from(NAMES[:4])
bodies = st.dictionaries(names | names | names | texts, values, max_size=6) | st.fixed_dictionaries(
    {"sampling_params": st.dictionaries(st.sampled_from(NAMES), values)}
)
leaves = st.none() | values.map(lambda value: json.dumps(value).encode())
edits = st.dictionaries(st.sampled_from(NAMES[:4]), leaves, max_size=4)
blanks = st.text(" \t\r\n", max_size=2)


@st.composite
def handwritten(draw):
    """A body as a client may write it: with spaces anywhere and escapes in keys."""
    members = list(draw(bodies).items())
    ascii_only = draw(st.booleans())
    written = []
    for name, value in members:
        key = json.dumps(name, ensure_ascii=ascii_only)
        if name in NAMES and draw(st.booleans()):
            key = '"' + "".join(f"\\u{ord(char):04x}" for char in name) + '"'
        text = json.dumps(value, ensure_ascii=ascii_only, indent=draw(st.sampled_from([None, 1])))
        written.append(f"{draw(blanks)}{key}{draw(blanks)}:{draw(blanks)}{text}{draw(blanks)}")
    text = draw(blanks) + "{" + (",".join(written) or draw(blanks)) + "}" + draw(blanks)
    return text.encode("utf-8", "surrogatepass")


def read(body):
    """All members in order, also those with equal names."""
    return json.loads(bytes(body).decode("utf-8", "surrogatepass"), object_pairs_hook=list)


def comparable(pairs):
    """NaN equals itself as text."""
    return json.dumps(pairs)


@given(handwritten(), edits)
def test_only_the_requested_changes_are_made(body, changes):
    before, after = read(body), read(splice(body, changes))
    names = [name for name, _ in before]
    added = [
        (name, read(text)) for name, text in changes.items()
        if name not in names and text is not None
    ]  # fmt: skip
    kept = [
        (name, read(changes[name]) if name in changes else value)
        for name, value in before
        if changes.get(name, b"") is not None
    ]
    assert comparable(after) == comparable([*added, *kept])


@given(handwritten(), edits)
def test_the_fast_path_and_the_walk_agree(body, changes):
    by_walk = [member for member in walk_members(body, 0, json_splice.PYTHON_SCALAR) if member]
    assert b"".join(splice_parts(body, changes, by_walk)) == splice(body, changes)


@st.composite
def encoded(draw):
    """A body as a JSON encoder writes it."""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (",", ": ")]))
    text = json.dumps(draw(bodies), ensure_ascii=draw(st.booleans()), separators=separators)
    return text.encode("utf-8", "surrogatepass")


@given(encoded() | handwritten(), st.lists(edits, min_size=1, max_size=3))
def test_bodies_of_encoders_are_spliced_like_any_other(body, changes):
    text, checked = json_splice.JsonText(body), json_splice.JsonText(body, is_checked=True)
    for edit in changes:
        assert text.splice(edit) == checked.splice(edit) == splice(body, edit)
        for name in edit:
            assert text.value(name) == checked.value(name)


@given(handwritten())
def test_without_changes_every_byte_stays(body):
    assert splice(body, {}) == body
    assert splice(body, {"absent": None}) == body


@given(handwritten(), st.sampled_from(NAMES[:4]), st.booleans())
def test_a_changed_key_that_occurs_twice_is_refused(body, name, escaped):
    spelling = f'"\\u{ord(name[0]):04x}{name[1:]}"' if escaped else f'"{name}"'
    twice = splice(body, {name: b"1"}).rstrip()[:-1] + f",{spelling}:2}}".encode()
    with pytest.raises(HttpError, match="twice") as refused:
        splice(twice, {name: b"3"})
    assert (refused.value.status, refused.value.code) == (400, "duplicate_key")


def test_other_keys_may_occur_twice_and_are_kept():
    assert splice(b'{"a":1,"a":2,"rid":3}', {"rid": b"4"}) == b'{"a":1,"a":2,"rid":4}'


@pytest.mark.parametrize(
    ("body", "changes", "spliced"),
    [
        (b"{}", {"rid": b'"r"'}, b'{"rid":"r"}'),
        (b"{ }", {"rid": b'"r"'}, b'{"rid":"r" }'),
        (b'{"a": 1.0}', {"rid": b"2", "stream": b"true"}, b'{"rid":2,"stream":true,"a": 1.0}'),
        (b'{"rid": 1 }', {"rid": None}, b"{ }"),
        (b'{"a":1, "rid":2}', {"rid": None}, b'{"a":1}'),
        (b'{"rid":2, "a":1}', {"rid": None}, b'{"a":1}'),
        (b'{"a":1, "rid":2, "stream" :3 }', {"stream": None, "rid": None}, b'{"a":1 }'),
        (b'{"rid":2, "stream":3}', {"stream": None, "rid": None, "b": b"4"}, b'{"b":4}'),
        (b'\xef\xbb\xbf{"rid":1}', {"rid": b"2"}, b'\xef\xbb\xbf{"rid":2}'),
        (b'{"prompt":"say \\"rid\\":1"}', {"rid": None}, b'{"prompt":"say \\"rid\\":1"}'),
        (b'{"a":{"rid":1}}', {"rid": b"2"}, b'{"rid":2,"a":{"rid":1}}'),
    ],
)
def test_members_are_added_replaced_and_removed(body, changes, spliced):
    assert splice(body, changes) == spliced


@pytest.mark.parametrize(
    ("body", "spliced"),
    [
        (b'{"sampling_params": {"max_tokens": 9, "n":1}}', b'{"sampling_params": {"max_tokens": 1, "n":1}}'),
        (b'{"sampling_params":{}}', b'{"sampling_params":{"max_tokens":1}}'),
        (b'{"sampling_params":null}', b'{"sampling_params":{"max_tokens":1}}'),
        (b"{}", b'{"sampling_params":{"max_tokens":1}}'),
    ],
)  # fmt: skip
def test_a_nested_object_is_changed_in_place(body, spliced):
    changes = {"sampling_params": {"max_tokens": b"1", "min_tokens": None}}
    assert splice(body, changes) == spliced


@pytest.mark.parametrize("value", [b"[1]", b'"x"', b"7"])
def test_a_nested_value_that_is_not_an_object_is_refused(value):
    with pytest.raises(HttpError, match="sampling_params must be an object"):
        splice(b'{"sampling_params":%b}' % value, {"sampling_params": {"n": b"1"}})


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"7", b'"rid"', b'{"rid":', b'{"rid":1', b'{"rid":1}}']
)
def test_a_body_that_is_not_an_object_is_refused(body):
    with pytest.raises(HttpError) as refused:
        splice(body, {"rid": b"1"})
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_another_encoding_is_refused_with_the_reason(encoding):
    with pytest.raises(HttpError, match="UTF-8"):
        splice('{"rid":1}'.encode(encoding), {"rid": b"1"})


@given(handwritten(), st.data())
def test_a_damaged_body_is_spliced_or_refused(body, data):
    raw = bytearray(body)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.sampled_from(b'"\\,:[]{}0\xff'))
    try:
        splice(bytes(raw), {"rid": b"1", "stream": None})
    except HttpError as refusal:
        assert refusal.status == 400  # noqa: PT017  both outcomes are valid
