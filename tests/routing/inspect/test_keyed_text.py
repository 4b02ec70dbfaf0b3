import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.body_fields import decode_body, keyed_fields, keyed_value
from omni_proxy.routing.inspect.prefix_text import LIMIT, prefix_text

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def text(body, *keys):
    return prefix_text(keyed_fields(json.dumps(body).encode(), keys))


def common_length(one, two):
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))


@pytest.mark.parametrize(
    "value",
    [
        "a text",
        [1, 2, 3],
        [[1, 2], [3]],
        ["a", "b"],
        [{"type": "text", "text": "a"}],
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        {"text": "a"},
    ],
)
def test_a_value_of_any_shape_is_converted_to_text(value):
    value_text = text({"x": value, "other": "ignored"}, "x")
    assert value_text
    assert value_text == text({"x": value}, "x")
    assert value_text != text({"x": "something else"}, "x")


def test_keys_are_read_in_the_configured_order():
    body = {"b": "second", "a": "first"}
    assert text(body, "a", "b").index(b"first") < text(body, "a", "b").index(b"second")


def test_a_dotted_key_is_read_from_the_nested_object():
    assert text({"input": {"ids": [5, 6]}}, "input.ids") == text({"x": [5, 6]}, "x")
    for other in ({"input": [1]}, {"input": None}, {"input": {"ids": None}}, {}):
        assert text(other, "input.ids") == b""


def test_requests_with_a_common_beginning_have_a_common_prefix():
    one = text({"instructions": "be kind", "input": "hello"}, "instructions", "input")
    two = text({"instructions": "be kind", "input": "good bye"}, "instructions", "input")
    assert common_length(one, two) > len("be kind")


def test_instructions_count_as_a_system_message():
    assert text({"instructions": "a"}, "instructions") == prefix_text(
        decode_body(b'{"messages": [{"role": "system", "content": "a"}]}')
    )


def test_token_ids_and_the_system_prompt_are_read_from_any_body():
    assert prefix_text(decode_body(b'{"token_ids": [1, 2]}')) == prefix_text(
        decode_body(b'{"input_ids": [1, 2]}')
    )
    with_system = prefix_text(
        decode_body(b'{"system": "a", "messages": [{"role":"user","content":"b"}]}')
    )
    assert with_system == prefix_text(
        decode_body(
            b'{"messages": [{"role":"system","content":"a"},{"role":"user","content":"b"}]}'
        )
    )
    parts = b'{"system": [{"type": "text", "text": "a"}], "messages": []}'
    assert b"a" in prefix_text(decode_body(parts))


@pytest.mark.parametrize("body", [b"", b"[]", b"no", b"\xff\xfe{", b'{"a": 1'])
def test_a_body_that_is_not_an_object_has_no_text(body):
    assert prefix_text(keyed_fields(body, ("a",))) == b""
    assert not len(keyed_value(body, "a"))


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON))
def test_the_text_of_any_body_is_bounded(body):
    assert len(text(body, "a", "b.c", "c")) <= LIMIT
