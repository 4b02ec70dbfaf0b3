from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.chunked import MAX_LINE_BYTES, MAX_TRAILER_BYTES, ChunkedBody
from omni_proxy.wire.errors import HttpError

LIMIT = 1000

GOOD = {
    "no chunk": (b"0\r\n\r\n", b""),
    "one chunk": (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
    "two chunks": (b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", b"hello!"),
    "hexadecimal sizes": (b"A\r\n0123456789\r\n000a\r\n0123456789\r\n0\r\n\r\n", b"0123456789" * 2),
    "extensions": (b'5;a=b\r\nhello\r\n0 ;c="d;e"\r\n\r\n', b"hello"),
    "line ends as payload": (b"4\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n\r\n"),
    "a trailer": (b"1\r\na\r\n0\r\nx: y\r\nz: 1\r\n\r\n", b"a"),
    "many zeros": (b"1\r\na\r\n00000\r\n\r\n", b"a"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "payload"), GOOD.values(), ids=GOOD)
def test_a_body_in_any_pieces_is_read_to_its_end_and_not_further(raw, payload):
    for pieces, rest in (
        ([raw], b""),
        ([raw[i : i + 1] for i in range(len(raw))], b""),
        ([raw + b"GET / HTTP/1.1\r\n"], b"GET / HTTP/1.1\r\n"),
    ):
        body = ChunkedBody(LIMIT)
        for piece in pieces:
            assert not body.is_complete
            body.feed(piece)
        assert body.is_complete
        assert (b"".join(body.payload), body.rest) == (payload, rest)


BROKEN = {
    "no size": b"\r\n",
    "a size that is none": b"x\r\n",
    "a signed size": b"+5\r\nhello\r\n",
    "a negative size": b"-1\r\n",
    "a prefixed size": b"0x5\r\nhello\r\n",
    "an underscored size": b"1_0\r\n",
    "a space before the size": b" 5\r\nhello\r\n",
    "two sizes": b"5 5\r\nhello\r\n",
    "a size of 16 digits": b"0000000000000005\r\nhello\r\n",
    "a bare LF after the size": b"5\nhello\r\n",
    "a bare CR in an extension": b"5;a\rb\r\nhello\r\n",
    "a NUL in an extension": b"5;\x00\r\nhello\r\n",
    "a chunk that is too long": b"5\r\nhello!\r\n",
    "a chunk that ends with a bare LF": b"5\r\nhello\n0\r\n",
    "a size line without end": b"0" * MAX_LINE_BYTES,
    "a trailer line with a bare LF": b"0\r\nx: y\n\r\n",
    "a trailer without end": b"0\r\n" + b"a: b\r\n" * MAX_TRAILER_BYTES,
}


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_invalid_framing_is_rejected_and_closes_the_connection(raw, size):
    body = ChunkedBody(LIMIT)

    def feed_all():
        for at in range(0, len(raw), size):
            body.feed(raw[at : at + size])

    with pytest.raises(HttpError) as caught:
        feed_all()
    assert (caught.value.status, caught.value.close) == (400, True)


def test_a_body_up_to_the_limit_is_accepted():
    body = ChunkedBody(LIMIT)
    body.feed(b"3e7\r\n%b\r\n1\r\n!\r\n0\r\n\r\n" % bytes(999))
    assert (body.is_complete, b"".join(body.payload)) == (True, bytes(999) + b"!")


@pytest.mark.parametrize(
    "raw", [b"3e9\r\n", b"3e8\r\n%b\r\n1\r\n" % bytes(1000), b"F" * 15 + b"\r\n"]
)
def test_a_body_above_the_limit_is_rejected_before_it_is_read(raw):
    with pytest.raises(HttpError) as caught:
        ChunkedBody(LIMIT).feed(raw)
    assert (caught.value.status, caught.value.close) == (413, True)


def naive(raw):
    """The payload and the bytes after the body; None if the body is incomplete."""
    payload, at = b"", 0
    while True:
        end = raw.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(raw[at:end].split(b";")[0], 16)
        at = end + 2
        if size == 0:
            break
        if len(raw) < at + size + 2:
            return None
        payload += raw[at : at + size]
        at += size + 2
    while True:
        end = raw.find(b"\r\n", at)
        if end < 0:
            return None
        if end == at:
            return payload, raw[end + 2 :]
        at = end + 2


CHUNK = st.tuples(st.binary(min_size=1, max_size=30), st.sampled_from([b"", b";a", b";a=b"]))


@st.composite
def bodies(draw):
    chunks = draw(st.lists(CHUNK, max_size=4))
    raw = b"".join(b"%x%b\r\n%b\r\n" % (len(data), ext, data) for data, ext in chunks)
    return raw + b"0\r\n" + draw(st.sampled_from([b"", b"x: y\r\n"])) + b"\r\n"


@given(
    bodies(), st.binary(max_size=10), st.lists(st.integers(0, 200), max_size=5), st.integers(0, 9)
)
def test_bodies_in_any_pieces_are_read_as_by_a_naive_decoder(raw, after, cuts, short):
    wire = raw[: len(raw) - short] if short > 5 else raw + after
    expected = naive(wire)
    body = ChunkedBody(LIMIT)
    bounds = sorted({0, len(wire), *(at for at in cuts if at < len(wire))})
    for a, b in pairwise(bounds):
        body.feed(wire[a:b])
    if expected is None:
        assert not body.is_complete
    else:
        assert (b"".join(body.payload), body.rest) == expected


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_no_other_error_than_http_error(raw):
    body = ChunkedBody(LIMIT)
    try:
        body.feed(raw)
    except HttpError:
        return
    assert sum(map(len, body.payload)) + len(body.rest) <= len(raw)
