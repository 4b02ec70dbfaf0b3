import gc
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.body_fields import (
    body_fields_of,
    decode_body,
    is_truthy,
    read_elements,
    read_text,
    read_value,
    restore_constants,
)
from omni_proxy.routing.inspect.requirements import RequestFacts, inspect_request
from omni_proxy.routing.routes import match_route
from omni_proxy.wire.errors import HttpError

texts = st.text(max_size=8) | st.sampled_from(
    ["m", "NaN", "-Infinity", "\ud800", "\udc00\ud800", "a\\ud800", "image_url", "\x01", "[1]"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
FIELDS = ["model", "stream", "request_id", "stream_format", "image", "voice", "x"]
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)


def encoded(body, encoding="utf-8", **options) -> bytes:
    return json.dumps(body, **options).encode(encoding, "surrogatepass")


def refused(body: bytes) -> str:
    with pytest.raises(HttpError) as caught:
        decode_body(body)
    return caught.value.message


def counts(value) -> bool:
    """Whether the value is not null, not false and not empty; a number counts even if it is 0."""
    return bool(value) or (isinstance(value, int | float) and value is not False)


@given(
    bodies,
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_the_fields_are_those_that_pythons_json_module_reads(body, encoding, ascii_only, indent):
    fields = decode_body(encoded(body, encoding, ensure_ascii=ascii_only, indent=indent))
    for name in ("model", "request_id"):
        value = body.get(name)
        assert getattr(fields, name) == (value if isinstance(value, str) else None)
    assert (fields.stream is True) == (body.get("stream") is True)
    for name in ("stream_format", "voice"):
        value = body.get(name)
        assert read_text(getattr(fields, name)) == (value if isinstance(value, str) else None)
    assert is_truthy(fields.image) == counts(body.get("image"))


@given(bodies, st.data())
def test_a_body_that_pythons_json_module_refuses_is_refused(body, data):
    raw = bytearray(encoded(body))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.sampled_from(b'"\\,:[]{}0N-\xff'))
    try:
        value = json.loads(bytes(raw))
    except ValueError:
        assert refused(bytes(raw)) == "invalid JSON body"
        return
    if isinstance(value, dict):
        decode_body(bytes(raw))
    else:
        assert refused(bytes(raw)) == "JSON request body must be an object"


@pytest.mark.parametrize(
    "body",
    [
        b'{"unread":"\xff"}', b'{"\xff":1}', b'{"input_ids":"\xff"}',
        b'{"a":1NaN}', b'{"a":-NaN}',
        b'{"a":"\\NaN"}', b"{NaN:1}", b'{"a":NaNNaN}', b'{"a":--Infinity}', b"[1",
        b'{"a":+Infinity}',
    ],
)  # fmt: skip
def test_invalid_json_is_refused_even_in_parts_that_routing_does_not_read(body):
    assert refused(body) == "invalid JSON body"


@pytest.mark.parametrize(
    ("spelling", "model"),
    [
        (rb"\ud800", "\ud800"),
        (rb"\udc00\ud800", "\udc00\ud800"),
        (rb"\ud83d\ude00\udc00", "\U0001f600\udc00"),
        (rb"\\ud800\udc00", "\\ud800\udc00"),  # the first is no escape, so the second is unpaired
        (rb"\\\ud800\\udc00", "\\\ud800\\udc00"),
    ],
)
def test_an_unpaired_surrogate_is_read_as_by_pythons_json_module(spelling, model):
    body = b'{"model":"%b"}' % spelling
    assert json.loads(body) == {"model": model}
    assert decode_body(body).model == model


@given(values)
def test_values_are_those_that_pythons_json_module_reads(value):
    decoded = read_value(body_fields_of({"messages": value}).messages)
    if "[1000000000000" not in repr(decoded):
        assert repr(decoded) == repr(json.loads(json.dumps(value)))


def test_only_lists_have_elements():
    fields = body_fields_of({"messages": [1, "a", {}], "prompt": {"a": 1}, "text": "[1]"})
    assert [bytes(element) for element in read_elements(fields.messages)] == [b"1", b'"a"', b"{}"]
    assert read_elements(fields.prompt) == read_elements(fields.text) == []
    assert read_elements(fields.audio) == []


def test_constants_round_trip():
    fields = decode_body(b'{"text": [NaN, -Infinity, "NaN Infinity"], "model": "NaN-7B"}')
    assert restore_constants(bytes(fields.text)) == b'[NaN, -Infinity, "NaN Infinity"]'
    assert fields.model == "NaN-7B"


@pytest.mark.parametrize(
    "piece", [b"[]", b"{}", b'""', b"0", b"NaN", b'{"type":"image"}', b'{"content":[{"type":1}]}']
)
@pytest.mark.parametrize(
    "field", [b"messages", b"model", b"images", b"modalities", b"items", b"references", b"x"]
)
def test_a_body_of_many_values_leaves_no_objects_in_memory(field, piece):
    body = b'{"%b":[%b1]}' % (field, (piece + b",") * 20_000)
    gc.collect()
    before = len(gc.get_objects())
    route = match_route("POST", "/v1/audio/speech")
    need = inspect_request(route, body, RequestFacts())
    assert need.body_fields is not None
    assert len(gc.get_objects()) - before < 100


def test_a_long_id_is_not_kept_and_a_long_model_name_is_cut():
    body = json.dumps({"model": "m" * 9000 + "😀", "request_id": "r" * 9000}).encode()
    need = inspect_request(match_route("POST", "/v1/audio/speech"), body, RequestFacts())
    assert (need.body_fields.model, need.body_fields.request_id, need.request_id) == (
        None,
        None,
        "",
    )
    assert need.model == "m" * 1024
