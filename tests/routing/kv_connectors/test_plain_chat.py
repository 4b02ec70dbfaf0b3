"""The bodies of `plain_chat` equal those of the protocols' edits."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.body_fields import BodyFields, decode_body
from omni_proxy.routing.inspect.json_splice import JsonText
from omni_proxy.routing.kv_connectors import nixl
from omni_proxy.routing.kv_connectors.plain_chat import (
    chat_with_params,
    decode_chat,
    one_token_chat,
    sglang_chat,
)
from omni_proxy.routing.kv_connectors.sglang import sglang_legs
from omni_proxy.wire.errors import HttpError

CHAT = "/v1/chat/completions"
SPLICED = {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}
URL = "http://h:1"
names = st.sampled_from(
    ["messages", "stream", "max_tokens", "max_completion_tokens", "n", "rid", "x"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.text(max_size=3) | names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
bodies = st.dictionaries(
    names | st.sampled_from([*sorted(SPLICED), "model", "stream_options", "min_tokens"]), values
)
spaces = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


@given(
    bodies,
    st.booleans(),
    st.none() | st.integers(1, 65535),
)
def test_a_plain_chat_equals_the_edited_body(body, is_ascii, port):
    text = json.dumps(body, ensure_ascii=is_ascii).encode("utf-8", "replace")
    json_text = JsonText(text)
    legs = sglang_legs(CHAT, json_text, URL, port, Random(7).randrange)
    plain = sglang_chat(text, URL, port, Random(7).randrange)
    if body.keys() & {"n", *SPLICED} or not body:
        assert plain is None
    elif plain is not None:
        both = json_text.splice(legs.prefill, legs.text)
        assert plain == (legs.rid, both, both)
        ranked = sglang_chat(text, URL, port, Random(7).randrange, 3)
        edits = {**legs.decode, "disagg_prefill_dp_rank": b"3"}
        assert ranked == (legs.rid, both, json_text.splice(edits))


NOT_PLAIN = [
    b' {"messages": []}',
    b'\xef\xbb\xbf{"messages": []}',
    '{"messages": []}'.encode("utf-16"),
    b"{}",
    b'{"n": 2}',
    b'{"\\u006e": 2}',
    b'{"r\\u0069d": "mine"}',
    b'{"bootstrap_room": 1}',
    b'{"messages": [{"content": "n", "name": "rid"}]}',
]


@pytest.mark.parametrize("body", NOT_PLAIN)
def test_a_chat_that_may_have_a_relevant_key_is_not_plain(body):
    assert sglang_chat(body, URL, 7, Random(7).randrange) is None


def test_the_keys_of_a_plain_chat_are_inserted_in_front():
    rid, body, other = sglang_chat(b'{"a": 1}', URL, None, lambda bound: bound - 1)
    assert body is other
    assert rid == "f" * 32
    assert body == (
        b'{"bootstrap_host":"h","bootstrap_port":null,"bootstrap_room":9223372036854775806,'
        b'"rid":"ffffffffffffffffffffffffffffffff","a": 1}'
    )


def test_a_chat_with_the_key_of_the_decode_leg_is_not_plain():
    body = b'{"disagg_prefill_dp_rank": 1}'
    assert sglang_chat(body, URL, 7, Random(7).randrange) is not None
    assert sglang_chat(body, URL, 7, Random(7).randrange, 0) is None


def fields_of(text):
    try:
        return decode_chat(text)
    except HttpError:
        return None


@given(bodies, spaces, st.booleans())
def test_a_one_token_body_equals_the_edited_body(body, separators, is_ascii):
    text = json.dumps(body, ensure_ascii=is_ascii, separators=separators).encode("utf-8", "replace")
    params = b'{"do_remote_decode":true}'
    one_token, fields = None, fields_of(text)
    if fields is not None:
        one_token = one_token_chat(text, fields, params)
    if one_token is None:
        return
    json_text = JsonText(text)
    assert one_token == json_text.splice(nixl.prefill_edits(CHAT, json_text, params))
    for own_params in (None, b'{"remote_port":1}'):
        assert chat_with_params(text, own_params) == json_text.splice(nixl.decode_edits(own_params))


PLAIN = [
    b'{"messages":[]}',
    b'{"messages":[],"max_tokens":64,"stream":false}',
    b'{"stream" : true , "messages":[], "max_tokens" :  64}',
    b'{"max_completion_tokens":7,"max_tokens":64,"messages":[{"content":"tokens"}]}',
    '{"messages":[{"content":"h\u00e4"}],"max_tokens":1}'.encode(),
    b'{"max_tokens":null,"messages":[{"content":"\\u4f60"}]}',
]


@pytest.mark.parametrize("body", PLAIN)
def test_typical_bodies_are_plain(body):
    fields = decode_chat(body)
    one_token = one_token_chat(body, fields, nixl.REMOTE_DECODE)
    assert one_token is not None
    assert json.loads(one_token)["max_tokens"] == 1
    assert json.loads(one_token)["stream"] is False
    text = JsonText(body)
    assert one_token == text.splice(nixl.prefill_edits(CHAT, text))


NOT_ONE_TOKEN = [
    b'{"max_tokens":1,"max_tokens":2}',
    b'{"max_tokens":1,"m\\u0061x_tokens":2}',
    b'{"max_tokens":1,"x":{"max_tokens":2}}',
    b'{"max_tokens":1,"x":"max_tokens"}',
    b'{"stream":true,"stream":false}',
    b'{"stream":null}',
    b'{"stream":1}',
    b'{"stream_options":{}}',
    b'{"min_tokens":1}',
    b'{"min_completion_tokens":1}',
    b'{"kv_transfer_params":{}}',
    b'{"x":NaN}',
    b' {"x":1}',
    b"{}",
    '{"x":1}'.encode("utf-16"),
    b'{"x":"\xff\xfe"}',
]


@pytest.mark.parametrize("body", NOT_ONE_TOKEN)
def test_an_ambiguous_body_is_not_plain(body):
    fields = fields_of(body)
    assert fields is None or one_token_chat(body, fields, nixl.REMOTE_DECODE) is None


def test_fields_without_the_token_limits_are_not_sufficient():
    body = b'{"max_tokens":3}'
    assert one_token_chat(body, decode_body(body), nixl.REMOTE_DECODE) is None
    assert one_token_chat(body, None, nixl.REMOTE_DECODE) is None


@given(bodies, st.booleans())
def test_the_fields_equal_those_of_the_general_decoder(body, is_ascii):
    text = json.dumps(body, ensure_ascii=is_ascii).encode("utf-8", "replace")
    expected, fields = decode_body(text), decode_chat(text)
    names = BodyFields.__struct_fields__
    assert [getattr(fields, name) for name in names] == [getattr(expected, name) for name in names]
