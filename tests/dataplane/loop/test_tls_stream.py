"""A TLS connection over a socket pair: our end as in the pump, the far one in the test's hands."""

import contextlib
import errno
import socket
import ssl
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.tls_stream import (
    PORTION_BYTES,
    RECORD_BYTES,
    SEALED_BYTES,
    TlsHandshake,
    TlsStream,
)
from tests.promises.secure import believing, showing


class Far:
    """The peer: TLS over a blocking socket, with its sealed bytes in our hands."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = believing().wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    def shake(self) -> bool:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def pull(self, size: int = 1 << 20) -> None:
        """What has arrived by now, at most so many sealed bytes."""
        try:
            self.incoming.write(self.sock.recv(size, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return

    def sealed(self, *pieces: bytes) -> bytes:
        for piece in pieces:
            self.tls.write(piece)
        return self.outgoing.read()

    def opened(self) -> bytes:
        """All that can be read by now."""
        got = b""
        while True:
            try:
                piece = self.tls.read(65536)
            except ssl.SSLWantReadError:
                return got
            if not piece:
                return got
            got += piece


class Both:
    """A shaken pair; `loop` never runs: what an event would say, the test says."""

    def __init__(self, *, small: bool = False) -> None:
        self.loop = EventLoop()
        near, far = socket.socketpair()
        near.setblocking(False)
        if small:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        plain = Stream(self.loop, near, None)
        self.far = Far(far)
        shake = TlsHandshake(showing())
        done = mine = False
        while not (done and mine):
            done = self.far.shake()
            near.send(b"")
            if sent := self.far.outgoing.read():
                shake.incoming.write(sent)
            mine = mine or shake._advance(plain)
            self.far.incoming.write(shake.outgoing.read())
        self.conn = TlsStream(plain, shake)
        assert self.conn.read(1) is None

    def arrive(self, sealed: bytes) -> None:
        self.far.sock.sendall(sealed)
        self.conn.readable = True

    def close(self) -> None:
        self.conn.close()
        self.far.sock.close()
        self.loop.flush()
        self.loop._epoll.close()


@pytest.fixture
def both():
    made = Both()
    yield made
    made.close()


def read_all(conn: Stream, size: int = 16384) -> list[bytes]:
    """As a coroutine of the pump does: while it is hot."""
    pieces = []
    while conn.readable:
        piece = conn.read(size)
        if piece is not None:
            pieces.append(piece)
            if not piece:
                break
    return pieces


def test_a_record_that_is_read_leaves_the_connection_cold(both):
    both.arrive(both.far.sealed(b"one"))
    assert both.conn.read(16384) == b"one"
    assert not both.conn.readable


def test_several_records_of_one_read_are_all_given(both):
    both.arrive(both.far.sealed(b"one", b"two", b"three"))
    assert read_all(both.conn) == [b"one", b"two", b"three"]


def test_half_a_record_is_nothing_yet(both):
    sealed = both.far.sealed(b"one")
    both.arrive(sealed[:-1])
    assert both.conn.read(16384) is None
    assert not both.conn.readable
    both.arrive(sealed[-1:])
    assert read_all(both.conn) == [b"one"]


def test_a_record_larger_than_what_is_asked_for_is_given_in_parts(both):
    both.arrive(both.far.sealed(b"abcdef"))
    assert read_all(both.conn, 4) == [b"abcd", b"ef"]


def test_more_than_one_read_of_the_socket_is_read_on(both):
    data = bytes(range(256)) * 400
    both.arrive(both.far.sealed(data))
    assert len(data) > 3 * SEALED_BYTES
    assert b"".join(read_all(both.conn)) == data
    assert not both.conn.readable


def test_an_event_without_bytes_is_no_end(both):
    both.conn.readable = True
    assert both.conn.read(16384) is None
    assert not both.conn.readable


def test_an_end_that_was_said_is_an_end(both):
    with pytest.raises(ssl.SSLWantReadError):
        both.far.tls.unwrap()
    both.arrive(both.far.outgoing.read())
    assert both.conn.read(16384) == b""


def test_an_end_that_was_not_said_is_an_error(both):
    both.far.sock.shutdown(socket.SHUT_WR)
    both.conn.readable = both.conn.peer_closed = True
    with pytest.raises(ConnectionResetError, match="TLS was not told"):
        both.conn.read(16384)


def test_what_came_before_a_cut_is_still_read(both):
    both.arrive(both.far.sealed(b"last words"))
    both.far.sock.close()
    both.conn.peer_closed = True
    assert both.conn.read(16384) == b"last words"
    with pytest.raises(ConnectionResetError):
        both.conn.read(16384)


def test_bytes_that_were_changed_on_the_way_are_an_error_and_the_peer_is_told(both):
    sealed = bytearray(both.far.sealed(b"one"))
    sealed[-1] ^= 1
    both.arrive(bytes(sealed))
    with pytest.raises(ssl.SSLError):
        both.conn.read(16384)
    both.far.pull()
    with pytest.raises(ssl.SSLError, match="BAD_RECORD_MAC"):
        both.far.tls.read(1)


def test_closing_says_so_and_a_reset_does_not(both):
    both.conn.close()
    both.loop.flush()
    both.far.pull()
    assert both.far.tls.read(1) == b""
    other = Both()
    other.conn.close(reset=True)
    other.loop.flush()
    other.far.incoming.write_eof()
    with pytest.raises(ssl.SSLError, match=r"(?i)eof"):  # as each Python has it
        other.far.tls.read(1)
    other.close()


def test_the_end_of_sending_is_said_and_what_still_comes_is_drained(both):
    both.conn.send_eof()
    both.far.pull()
    assert both.far.tls.read(1) == b""
    both.arrive(both.far.sealed(b"late") * 2)
    assert len(b"".join(read_all(both.conn))) > 8


def test_words_of_tls_alone_are_no_answer(both):
    both.conn.readable = True
    assert not both.conn.has_input()
    sealed = both.far.sealed(b"answer")
    both.arrive(sealed[:7])
    assert not both.conn.has_input()
    both.arrive(sealed[7:])
    assert both.conn.has_input()
    assert both.conn.has_input()
    assert read_all(both.conn, 4) == [b"answ", b"er"]
    assert not both.conn.has_input()


@pytest.mark.parametrize("first", [b"", b"x" * 16384, b"y" * 40_000])
def test_looking_ahead_loses_nothing_of_what_follows(both, first):
    both.arrive(both.far.sealed(*([first] if first else []), b"second"))
    assert both.conn.has_input()
    assert b"".join(read_all(both.conn)) == first + b"second"
    assert not both.conn.readable


def test_what_is_put_back_is_read_once_more(both):
    both.arrive(both.far.sealed(b"first"))
    both.conn.unread(both.conn.read(16384))
    assert both.conn.readable
    both.arrive(both.far.sealed(b"second"))
    assert read_all(both.conn) == [b"first", b"second"]
    assert not both.conn.readable


def test_an_end_or_a_fault_found_ahead_is_met_again(both):
    with pytest.raises(ssl.SSLWantReadError):
        both.far.tls.unwrap()
    both.arrive(both.far.outgoing.read())
    assert both.conn.has_input()
    assert both.conn.read(16384) == b""
    other = Both()
    sealed = bytearray(other.far.sealed(b"one"))
    sealed[-1] ^= 1
    other.arrive(bytes(sealed))
    for _ in range(2):
        assert other.conn.has_input()
        with pytest.raises(ssl.SSLError):
            other.conn.read(16384)
    other.close()


def test_its_session_is_there_to_be_resumed(both):
    assert both.conn.session is not None
    assert both.conn.is_tls
    assert not Stream.is_tls


def test_several_pieces_go_as_one(both):
    assert both.conn.sendmsg([b"head ", b"body"]) == 9
    both.far.pull()
    assert both.far.opened() == b"head body"


def test_a_full_socket_is_told_and_nothing_is_lost_or_said_twice():
    both = Both(small=True)
    data = bytes(range(251)) * 4_000
    left, blocked = memoryview(data), 0
    got = b""
    while left:
        try:
            left = left[both.conn.send(left) :]
        except BlockingIOError:
            blocked += 1
        both.far.pull(1 << 14)
        got += both.far.opened()
    assert blocked
    assert got + drained(both) == data
    both.close()


@pytest.mark.parametrize("size", [70_000, 1_000_000])
def test_pieces_too_large_to_be_joined_go_until_the_socket_is_full(size):
    both = Both(small=True)
    pieces = [b"head ", bytes(range(251)) * (size // 251)]
    sent = both.conn.sendmsg(pieces)
    assert len(pieces[0]) <= sent < sum(map(len, pieces))
    left, got = memoryview(b"".join(pieces))[sent:], b""
    while left:
        both.far.pull(1 << 14)
        got += both.far.opened()
        with contextlib.suppress(BlockingIOError):
            left = left[both.conn.send(left) :]
    assert got + drained(both) == b"".join(pieces)
    both.close()


def drained(both: Both) -> bytes:
    got = b""
    while True:
        try:
            both.far.incoming.write(both.far.sock.recv(1 << 20, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return got + both.far.opened()
        got += both.far.opened()


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(1, 3 * PORTION_BYTES), min_size=1, max_size=6),
    pulls=st.lists(st.integers(1, 1 << 16), min_size=1, max_size=20),
)
def test_whatever_the_sizes_and_the_readers_pace_bytes_come_in_order(sizes, pulls):
    both = Both(small=True)
    got, sent, turn = b"", b"", 0
    for number, size in enumerate(sizes):
        piece = bytes((number + at) % 251 for at in range(size))
        sent += piece
        left = memoryview(piece)
        while left:
            try:
                taken = both.conn.send(left)
            except BlockingIOError:
                both.far.pull(pulls[turn % len(pulls)])
                turn += 1
            else:
                assert taken
                left = left[taken:]
            got += both.far.opened()
    assert got + drained(both) == sent
    both.close()


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    records=st.lists(st.binary(min_size=1, max_size=20_000), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 60_000), max_size=8),
    size=st.sampled_from([1_000, 16384, 262144]),
)
def test_however_records_are_cut_on_the_way_their_bytes_come_in_order(records, cuts, size):
    both = Both()
    sealed = both.far.sealed(*records)
    edges = sorted({0, len(sealed), *(cut % (len(sealed) + 1) for cut in cuts)})
    got = b""
    for start, end in pairwise(edges):
        both.arrive(sealed[start:end])
        got += b"".join(read_all(both.conn, size))
        assert not both.conn.readable
    assert got == b"".join(records)
    both.close()


def test_a_broken_socket_is_an_error(both):
    both.far.sock.close()
    with pytest.raises(OSError) as caught:
        both.conn.send(b"x")
    assert caught.value.errno in (errno.EPIPE, errno.ECONNRESET)


def test_what_comes_behind_our_goodbye_is_drained_to_its_end(both):
    both.far.sock.sendall(both.far.sealed(bytes(RECORD_BYTES)))
    both.conn.readable = True
    assert both.conn.read(RECORD_BYTES) == bytes(RECORD_BYTES)
    both.conn.send_eof()
    assert both.conn.read(SEALED_BYTES) is None  # nothing more is there, and that is no end
    sealed = both.far.sealed(bytes(100))
    both.far.sock.sendall(sealed)
    assert both.conn.read(SEALED_BYTES) == sealed
