from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.kv_transfer.wire import (
    HEADER,
    MAGIC,
    MAX_BODY_BYTES,
    VERSION,
    FrameKind,
    Hello,
    Identity,
    Offer,
    Refuse,
    WireError,
    bound,
    difference,
    frame,
    header,
    message,
    parse,
    parse_header,
)

PREFILL = Identity("tiny", "layers 4", "float32", "v1", "abc")
BODIES = {
    FrameKind.HELLO: Hello("room:1", "", "digest", 3, PREFILL),
    FrameKind.OFFER: Offer(4, 1024, 512, 0),
    FrameKind.REFUSE: Refuse("it is gone"),
}


@given(st.sampled_from(FrameKind), st.integers(0, MAX_BODY_BYTES))
def test_a_header_round_trips_up_to_the_size_limit_of_its_kind(kind, length):
    if length <= bound(kind):
        assert parse_header(header(kind, length)) == (kind, length)
    else:
        with pytest.raises(ValueError, match="over the limit"):
            header(kind, length)


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_any_twelve_bytes_are_a_bounded_header_or_refused(data):
    try:
        kind, length = parse_header(data)
    except WireError:
        return
    assert length <= bound(kind)


@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_only_this_version_and_these_kinds_are_read(version, kind, length):
    data = HEADER.pack(MAGIC, version, kind, length)
    is_valid = version == VERSION and kind in set(FrameKind) and length <= bound(FrameKind(kind))
    if is_valid:
        assert parse_header(data) == (kind, length)
    else:
        with pytest.raises(WireError):
            parse_header(data)


@pytest.mark.parametrize("kind", BODIES)
def test_a_message_round_trips(kind):
    data = message(kind, BODIES[kind])
    assert parse_header(data[: HEADER.size]) == (kind, len(data) - HEADER.size)
    assert parse(data[HEADER.size :], type(BODIES[kind])) == BODIES[kind]


@given(st.binary(max_size=200), st.sampled_from([Hello, Offer, Refuse]))
def test_a_body_of_any_bytes_is_a_message_or_refused(body, message_type):
    with suppress(WireError):
        assert isinstance(parse(body, message_type), message_type)


@pytest.mark.parametrize("kind", BODIES)
def test_a_message_truncated_anywhere_is_refused(kind):
    body = msgspec.msgpack.encode(BODIES[kind])
    for length in range(len(body)):
        with pytest.raises(WireError):
            parse(body[:length], type(BODIES[kind]))


def test_a_frame_without_a_body_is_its_header():
    assert frame(FrameKind.DONE) == header(FrameKind.DONE, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sizes": "layers 5"}, "models differ"),
        ({"dtype": "bfloat16"}, "bfloat16 at prefill and float32 at decode"),
        ({"weight_version": "v2"}, "'v2' at prefill, 'v1' at decode"),
        ({"weights": "abd"}, "although both are called 'v1'"),
    ],
)
def test_the_difference_that_makes_a_kv_unusable_is_named(changes, reason):
    decode = msgspec.structs.replace(PREFILL, **changes)
    assert reason in difference(PREFILL, decode)


def test_the_name_of_a_model_makes_no_difference():
    assert difference(PREFILL, msgspec.structs.replace(PREFILL, model="/models/tiny")) == ""
