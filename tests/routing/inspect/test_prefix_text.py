import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.body_fields import body_fields_of, decode_body
from omni_proxy.routing.inspect.prefix_text import LIMIT, prefix_text


def text_of(**body) -> bytes:
    return prefix_text(decode_body(json.dumps(body).encode()))


def test_messages_are_encoded_in_order_with_their_roles():
    text = text_of(
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url"}]},
            {"role": "critic", "content": "No."},
        ]
    )
    assert text == b"\xf5Be kind.\xf6\xfcHi\xfc\xfaimage_url\xfb\xfacritic\xfbNo."


def test_bodies_of_different_structure_have_different_texts():
    bodies = [
        {"messages": [{"role": "user", "content": "ab"}]},
        {"messages": [{"role": "system", "content": "ab"}]},
        {"messages": [{"role": "usera", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]},
        {"messages": [{"role": "user", "content": ["a", "b"]}]},
        {"prompt": "ab"},
        {"prompt": ["a", "b"]},
        {"prompt": [97, 98]},
        {"prompt": [[97], [98]]},
        {"input_ids": [97, 98]},
    ]
    assert len({text_of(**body) for body in bodies}) == len(bodies)


def test_a_longer_conversation_begins_with_the_shorter_one():
    turns = [{"role": role, "content": role * 20} for role in ("system", "user", "assistant")]
    shorter, longer = (text_of(messages=turns[:count]) for count in (2, 3))
    assert longer.startswith(shorter)


def test_token_ids_are_compared_token_by_token():
    assert text_of(prompt=[1, 2, 70000])[1:].hex() == "010000000200000070110100"
    assert text_of(input_ids=[5, 6, 7]).startswith(text_of(input_ids=[5, 6])[:-1])


def test_token_ids_are_read_from_a_body_that_only_the_slow_parser_accepts():
    body = b'{"input_ids": [5, 6], "temperature": NaN}'
    assert prefix_text(decode_body(body)) == b"\xfe[5, 6]"


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "odd"]), st.text(max_size=5))))
def test_plain_messages_and_messages_with_parts_have_the_same_text(messages):
    """Only messages without parts are read by the fast path."""
    plain = [{"role": role, "content": text} for role, text in messages]
    mixed = [*plain, {"role": "user", "content": []}]  # the same, and one more role
    assert text_of(messages=mixed) == text_of(messages=plain) + b"\xf6"
    for limit in range(20):
        short = prefix_text(body_fields_of({"messages": plain}), limit)
        assert short == prefix_text(body_fields_of({"messages": mixed}), 100)[:limit][: len(short)]
        assert short == prefix_text(body_fields_of({"messages": plain}), 100)[:limit]


@pytest.mark.parametrize("body", [{}, {"input_ids": None}, {"messages": []}, {"prompt": None}])
def test_a_body_without_text_has_an_empty_prefix(body):
    assert text_of(**body) == b""
    assert prefix_text(None) == b""


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * 10**6}]},
        {"messages": [{"role": "r" * 10**6, "content": "é" * 10**6}]},
        {"messages": [{"role": "user", "content": "hello"}] * 10**5},
        {"messages": [{"role": "user", "content": [{}] * 10**6}]},
        {"prompt": ["x"] * 10**6},
        {"prompt": list(range(10**5))},
        {"input_ids": list(range(10**5))},
        {"text": "x" * 10**6},
    ],
)
def test_a_text_is_bounded(body):
    payload = body_fields_of(body)
    assert 0 < len(prefix_text(payload)) <= LIMIT
    assert len(prefix_text(payload, 10)) <= 10


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.just("\ud800 lone") | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "text", "type", "x"]), inner, max_size=3
    ),
    max_leaves=12,
)  # fmt: skip


@given(odd, odd, odd, odd)
def test_any_body_has_a_prefix_text(messages, prompt, text, input_ids):
    payload = body_fields_of(
        {"messages": messages, "prompt": prompt, "text": text, "input_ids": input_ids}
    )
    assert isinstance(prefix_text(payload), bytes)


def test_lone_surrogates_and_deep_nesting_are_accepted():
    assert prefix_text(decode_body(rb'{"prompt": "\ud800"}')) == b"\xfd\xed\xa0\x80"
    deep = "[" * 500 + "]" * 500
    assert prefix_text(decode_body(f'{{"prompt": {deep}, "messages": {deep}}}'.encode()))
