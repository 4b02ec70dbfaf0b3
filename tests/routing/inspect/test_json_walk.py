import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect import large_json
from omni_proxy.routing.inspect.large_json import (
    MAX_KEYS,
    PREFIX_BYTES,
    SLICE_BYTES,
    walk_large_json,
)
from omni_proxy.wire.errors import HttpError

NAMES = (
    "model",
    "stream",
    "stream_format",
    "request_id",
    "messages",
    "prompt",
    "text",
    "input_ids",
)
texts = st.text(max_size=9) | st.sampled_from(['"', "\\", '\\"', "[", "}", '{"a":', "\ud800"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
bodies = st.dictionaries(st.sampled_from(NAMES) | texts, values, max_size=6)


def walked(body: bytes):
    """The fields of the body, and how often the walk yielded."""
    steps, turns = walk_large_json(body), 0
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value, turns
        turns += 1


@pytest.fixture(params=[SLICE_BYTES, 16], ids=["large slices", "small slices"])
def slices(request, monkeypatch):
    """Small slices end anywhere: in a string, an escape or a list."""
    monkeypatch.setattr(large_json, "SLICE_BYTES", request.param)
    monkeypatch.setattr(large_json, "FIRST_BYTES", min(8, request.param))


@pytest.mark.usefixtures("slices")
def test_the_top_level_fields_are_those_that_a_json_parser_finds():
    @given(bodies, st.sampled_from([None, 1]), st.booleans(), st.text(" \t\n\r", max_size=40))
    def holds(body, indent, ascii_only, blanks):
        text = json.dumps(body, indent=indent, ensure_ascii=ascii_only)
        raw_body = (blanks + text + blanks).encode("utf-8", "surrogatepass")
        top, _ = walked(raw_body)
        for name in NAMES:
            raw = bytes(getattr(top, name))
            assert (name in body) == bool(raw)
            assert (
                name not in body or json.loads(raw.decode("utf-8", "surrogatepass")) == body[name]
            )

    holds()


@pytest.mark.usefixtures("slices")
def test_a_name_may_be_written_with_escapes():
    top, _ = walked(rb'{"m\u006fdel": "m", "routed\u005fdp_rank": 1}')
    assert (bytes(top.model), bytes(top.routed_dp_rank)) == (b'"m"', b"1")


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"[]", b"{", b"{}x", b'{"a"}', b'{"a":}', b'{"a":1,}', b'{"a":1 "b":2}',
        b"{a:1}",
        b'{"a":tru}', b'{"a":01}', b'{"a":NaN}', b'{"a":"x', b'{"a":"\x01"}', b'{"a":"\\x"}',
        b'{"a":[1', b'{"a":["x]}', b'{"a":{"b":[]}', b'{"a":1}}', b'{"a":' + b"1" * 5000 + b"}",
        b'{"model":"m"',
    ],
)  # fmt: skip
def test_a_body_that_is_not_an_object_is_refused(body):
    with pytest.raises(HttpError, match="invalid JSON body"):
        walked(body)


@given(bodies, st.data())
def test_a_damaged_body_is_walked_or_refused(body, data):
    raw = bytearray(json.dumps(body).encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.sampled_from(b'"\\,:[]{}0\xff'))
    try:
        walked(bytes(raw))
    except HttpError as refusal:
        assert refusal.status == 400  # noqa: PT017  both outcomes are valid


@pytest.mark.parametrize(
    "piece", [b"[],", b"{},", b'"",', b'"\\"[",', b"1,", b"[" * 99 + b"]" * 99 + b",", b'{"a":{}},']
)
def test_the_walk_yields_between_slices_whatever_the_body_contains(piece):
    many = piece * (4 * SLICE_BYTES // len(piece))
    top, turns = walked(b'{"messages":[' + many + b'1],"model":"m"}')
    assert bytes(top.model) == b'"m"'
    assert turns >= len(many) // SLICE_BYTES - 1
    assert re.match(rb"\[" + re.escape(piece), bytes(top.messages))
    assert len(bytes(top.messages)) == PREFIX_BYTES


@pytest.mark.parametrize("text", [b"A", b"\\n", b'\\"', "é".encode(), b"[", b"\\\\"])
def test_long_texts_are_also_walked_in_slices(text):
    many = text * (4 * SLICE_BYTES // len(text))
    for body in (b'{"messages":["%b"],"model":"m"}', b'{"prompt":"%b","model":"m"}'):
        top, turns = walked(body % many)
        assert bytes(top.model) == b'"m"'
        assert turns >= 3


def test_the_last_field_of_a_name_wins_and_their_number_is_limited():
    assert bytes(walked(b'{"model":"a","model":"b"}')[0].model) == b'"b"'
    few, many = (b'{"a":[]' + b',"a":[]' * count + b"}" for count in (MAX_KEYS - 1, MAX_KEYS))
    assert walked(few)[1] > 10
    with pytest.raises(HttpError, match="10000 fields"):
        walked(many)
