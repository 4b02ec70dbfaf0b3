"""A body that is read without being decoded has the requirements of the decoded one.

Only the native build reads bodies without decoding them.
"""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.plain_body import READS_BODIES, read_plain_body
from omni_proxy.routing.inspect.requirements import requirements_of_json
from omni_proxy.routing.routes import match_route
from omni_proxy.wire.errors import HttpError

CHAT = match_route("POST", "/v1/chat/completions")
NAMES = st.sampled_from(
    ("model", "stream", "messages", "request_id", "rid", "image", "audio", "video", "images", "audios",
     "videos", "modalities", "output_modalities", "audio_inputs", "type", "content", "tools", "prompt",
     "max_tokens", "role", "", "modelx", "text")
)  # fmt: skip
TEXTS = NAMES | st.text(st.characters(codec="ascii"), max_size=6) | st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXTS, inner, max_size=3),
    max_leaves=8,
)
USUAL = st.fixed_dictionaries(
    {"model": TEXTS},
    optional={
        "stream": st.booleans() | st.none(),
        "messages": st.lists(st.fixed_dictionaries({"role": TEXTS, "content": VALUES}), max_size=3),
        "max_tokens": st.integers() | st.floats(allow_nan=False),
        "tools": VALUES,
    },
)
BODIES = (USUAL | st.dictionaries(NAMES, VALUES)).flatmap(
    lambda body: st.sampled_from((None, 1)).map(lambda indent: json.dumps(body, indent=indent))
)
WRITTEN = (
    b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":64,"stream":true}',
    b'{"messages": [{"role": "user", "content": "hello"}]}',
    b'{"model":"m","stream":false,"temperature":0.5,"top_p":1e-3,"n":-1,"stop":["a","b"],"x":{}}',
    b' { "model" : "m" , "tools" : [ { "type" : "function" } ] , "logit_bias" : { "1" : 0 } } ',
)


def decoded(body):
    try:
        need = requirements_of_json(CHAT, body)
    except HttpError as refused:
        return refused.message
    return need


def check(body):
    need = read_plain_body(CHAT, body)
    if need is not None:
        expected = decoded(body)
        assert need.body_fields == expected.body_fields
        assert need == expected


@given(BODIES)
@example('{"model":"m","model":"n"}')
@example('{"model":"m","messages":[{"content":[{"type":"image"}]}]}')
@example('{"model":"m","messages":' + "[" * 70 + "]" * 70 + "}")
def test_a_body_read_directly_has_the_requirements_of_the_decoded_one(body):
    check(body.encode("utf-8", "surrogatepass"))


@given(st.sampled_from(WRITTEN), st.data())
def test_a_damaged_body_is_read_as_the_decoder_reads_it(body, data):
    at = data.draw(st.integers(0, len(body) - 1))
    end = data.draw(st.integers(at, min(len(body), at + 4)))
    inserted = data.draw(st.sampled_from([*b'{}[]",: \\01-.eEtn\x00\x80', None]))
    check(body[:at] + (b"" if inserted is None else bytes((inserted,))) + body[end:])


@pytest.mark.parametrize("body", WRITTEN)
def test_the_native_build_reads_what_most_clients_write(body):
    assert (read_plain_body(CHAT, body) is not None) == READS_BODIES
    check(body)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{}", b"[]", b'{"model":"m"', b'{"model":"m"}x', b'{"model":"m",}', b'{"model":01}',
     b'{"a":1.}', b'{"a":-}', b'{"a":1e}', b'{"a":tru}', b'{"a" 1}', b'{"a":1 "b":2}', b'{"a":[1,]}',
     b'{"a":"\x01"}', b'{"a":"\xff"}', b'{"model":""}', b'{"model":null}', b'{"stream":1}',
     b'{"a":[}', b'{"a":{]}', b'{"a":"'],
)  # fmt: skip
def test_unusual_bodies_are_left_to_the_decoder(body):
    assert read_plain_body(CHAT, body) is None
