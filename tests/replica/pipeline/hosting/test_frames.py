import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.pipeline.hosting import frames
from omni_proxy.replica.pipeline.hosting.frames import FrameDecoder, FrameError, encode_frame


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(1, 9))
def test_frames_come_out_whole_however_the_bytes_are_cut(bodies, step):
    stream = b"".join(encode_frame(body) for body in bodies)
    reader, got = FrameDecoder(), []
    for start in range(0, len(stream), step):
        got += reader.feed(stream[start : start + step])
    assert [frames.msgspec.msgpack.decode(body) for body in got] == bodies


def test_a_length_past_the_bound_is_refused_before_its_bytes_come():
    with pytest.raises(FrameError, match="over the bound"):
        list(FrameDecoder().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize("message", [object(), 1 << 70, {"a": {1, 2}.__iter__()}])
def test_what_msgpack_cannot_hold_is_refused(message):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        encode_frame(message)


def test_a_message_past_the_bound_is_refused(monkeypatch):
    monkeypatch.setattr(frames, "MAX_BYTES", 8)
    with pytest.raises(ValueError, match="over the bound of 8"):
        encode_frame(b"123456789")
