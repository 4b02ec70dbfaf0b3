"""Complete chunks that skip llhttp: it would accept them, and end between chunks as before.

In the plain build llhttp parses all chunks.
"""

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.scan.whole_chunks import READS_CHUNKS, are_whole_chunks

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'14\r\ndata: {"token": 1}\n\n\r\n'
PIECES = st.lists(
    st.sampled_from([b"1", b"a", b"F", b"0", b"\r\n", b"\r", b"\n", b"x", b";n=1", b" ", b"\0", b"\xff", EVENT]),
    max_size=8,
).map(b"".join)  # fmt: skip
CHUNKS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3).map(
    lambda payloads: b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads)
)


class Callbacks:
    is_complete = False

    def on_message_complete(self):
        self.is_complete = True


def is_between_chunks_after(piece):
    callbacks = Callbacks()
    parser = httptools.HttpResponseParser(callbacks)
    parser.feed_data(HEAD)
    parser.feed_data(piece)
    if callbacks.is_complete:
        return False
    parser.feed_data(b"0\r\n\r\n")
    return callbacks.is_complete


@given(PIECES | CHUNKS, st.data())
def test_llhttp_is_between_chunks_after_complete_chunks(piece, data):
    at = data.draw(st.integers(0, len(piece)))
    for part in (piece, piece[:at], piece[at:]):
        if are_whole_chunks(part):
            assert is_between_chunks_after(part)


@pytest.mark.parametrize("piece", [EVENT, EVENT * 2, b"A\r\n0123456789\r\n", b"1\r\n\r\r\n"])
def test_the_native_build_recognizes_complete_chunks(piece):
    assert are_whole_chunks(piece) == READS_CHUNKS


@pytest.mark.parametrize(
    "piece",
    [b"", b"0\r\n\r\n", EVENT[:-1], EVENT + b"1", EVENT[1:], b"1;n=1\r\na\r\n", b"1 \r\na\r\n", b"\r\na\r\n",
     b"ffffffffffffffff\r\na\r\n", b"fffffff\r\na\r\n", b"1\r\nab\r\n", b"g\r\na\r\n", b"1\na\r\n", b"1\r\na\n\n"],
)  # fmt: skip
def test_other_pieces_are_parsed_by_llhttp(piece):
    assert not are_whole_chunks(piece)
