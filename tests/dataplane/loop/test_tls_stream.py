"""A TLS connection over a socket pair: a TlsStream, and a peer that the test controls."""

import contextlib
import errno
import socket
import ssl
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_proxy import native
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.tls_stream import (
    ENCRYPTED_READ_BYTES,
    PORTION_BYTES,
    RECORD_BYTES,
    TlsHandshake,
    TlsStream,
)
from tests.example_counts import examples
from tests.promises.support.tls_helpers import client_context, server_context


class TlsPeer:
    """The peer: TLS over a blocking socket. The test moves the encrypted bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = client_context().wrap_bio(
            self.incoming, self.outgoing, server_hostname="localhost"
        )

    def do_handshake(self) -> bool:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def pull(self, size: int = 1 << 20) -> None:
        """Read encrypted bytes that have arrived, at most `size`."""
        try:
            self.incoming.write(self.sock.recv(size, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return

    def encrypted(self, *chunks: bytes) -> bytes:
        for chunk in chunks:
            self.tls.write(chunk)
        return self.outgoing.read()

    def decrypted(self) -> bytes:
        """All decrypted bytes that are available."""
        received = b""
        while True:
            try:
                chunk = self.tls.read(65536)
            except ssl.SSLWantReadError:
                return received
            if not chunk:
                return received
            received += chunk


class TlsPair:
    """A TlsStream and its peer after the handshake. `loop` never runs: the test sets `readable`."""

    def __init__(self, *, small: bool = False) -> None:
        self.loop = EventLoop()
        near, peer = socket.socketpair()
        near.setblocking(False)
        if small:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        plain = Stream(self.loop, near, None)
        self.peer = TlsPeer(peer)
        handshake = TlsHandshake(server_context())
        peer_done = stream_done = False
        while not (peer_done and stream_done):
            peer_done = self.peer.do_handshake()
            near.send(b"")
            if sent := self.peer.outgoing.read():
                handshake.incoming.write(sent)
            stream_done = stream_done or handshake._advance(plain)
            self.peer.incoming.write(handshake.outgoing.read())
        self.stream = TlsStream(plain, handshake)
        assert self.stream.read(1) is None

    def arrive(self, encrypted: bytes) -> None:
        self.peer.sock.sendall(encrypted)
        self.stream.readable = True

    def close(self) -> None:
        self.stream.close()
        self.peer.sock.close()
        self.loop.flush()
        self.loop._epoll.close()


@pytest.fixture
def pair():
    connected = TlsPair()
    yield connected
    connected.close()


def read_all(stream: Stream, size: int = 16384) -> list[bytes]:
    """Read while the stream is readable, as a connection task does."""
    chunks = []
    while stream.readable:
        chunk = stream.read(size)
        if chunk is not None:
            chunks.append(chunk)
            if not chunk:
                break
    return chunks


def test_after_the_only_record_the_stream_is_not_readable(pair):
    pair.arrive(pair.peer.encrypted(b"one"))
    assert pair.stream.read(16384) == b"one"
    assert not pair.stream.readable


def test_all_records_of_one_read_are_returned(pair):
    pair.arrive(pair.peer.encrypted(b"one", b"two", b"three"))
    assert read_all(pair.stream) == [b"one", b"two", b"three"]


def test_an_incomplete_record_has_no_bytes(pair):
    encrypted = pair.peer.encrypted(b"one")
    pair.arrive(encrypted[:-1])
    assert pair.stream.read(16384) is None
    assert not pair.stream.readable
    pair.arrive(encrypted[-1:])
    assert read_all(pair.stream) == [b"one"]


def test_a_record_larger_than_the_read_is_returned_in_parts(pair):
    pair.arrive(pair.peer.encrypted(b"abcdef"))
    assert read_all(pair.stream, 4) == [b"abcd", b"ef"]


def test_reading_continues_after_a_full_read_of_the_socket(pair):
    data = bytes(range(256)) * 400
    pair.arrive(pair.peer.encrypted(data))
    assert len(data) > 3 * ENCRYPTED_READ_BYTES
    assert b"".join(read_all(pair.stream)) == data
    assert not pair.stream.readable


def test_an_event_without_bytes_is_not_the_end(pair):
    pair.stream.readable = True
    assert pair.stream.read(16384) is None
    assert not pair.stream.readable


def test_close_notify_is_the_end(pair):
    with pytest.raises(ssl.SSLWantReadError):
        pair.peer.tls.unwrap()
    pair.arrive(pair.peer.outgoing.read())
    assert pair.stream.read(16384) == b""


def test_a_close_without_close_notify_is_an_error(pair):
    pair.peer.sock.shutdown(socket.SHUT_WR)
    pair.stream.readable = pair.stream.peer_closed = True
    with pytest.raises(ConnectionResetError, match="without close_notify"):
        pair.stream.read(16384)


def test_bytes_before_an_unclean_close_are_read(pair):
    pair.arrive(pair.peer.encrypted(b"last words"))
    pair.peer.sock.close()
    pair.stream.peer_closed = True
    assert pair.stream.read(16384) == b"last words"
    with pytest.raises(ConnectionResetError):
        pair.stream.read(16384)


def test_corrupted_bytes_are_an_error_and_the_peer_gets_an_alert(pair):
    encrypted = bytearray(pair.peer.encrypted(b"one"))
    encrypted[-1] ^= 1
    pair.arrive(bytes(encrypted))
    with pytest.raises(ssl.SSLError):
        pair.stream.read(16384)
    pair.peer.pull()
    with pytest.raises(ssl.SSLError, match="BAD_RECORD_MAC"):
        pair.peer.tls.read(1)


def test_close_sends_close_notify_and_a_reset_does_not(pair):
    pair.stream.close()
    pair.loop.flush()
    pair.peer.pull()
    assert pair.peer.tls.read(1) == b""
    other = TlsPair()
    other.stream.close(reset=True)
    other.loop.flush()
    other.peer.incoming.write_eof()
    with pytest.raises(ssl.SSLError, match=r"(?i)eof"):  # the text depends on the Python version
        other.peer.tls.read(1)
    other.close()


def test_send_eof_sends_close_notify_and_input_can_be_drained(pair):
    pair.stream.send_eof()
    pair.peer.pull()
    assert pair.peer.tls.read(1) == b""
    pair.arrive(pair.peer.encrypted(b"late") * 2)
    assert len(b"".join(read_all(pair.stream))) > 8


def test_tls_protocol_messages_are_no_input(pair):
    pair.stream.readable = True
    assert not pair.stream.has_input()
    encrypted = pair.peer.encrypted(b"answer")
    pair.arrive(encrypted[:7])
    assert not pair.stream.has_input()
    pair.arrive(encrypted[7:])
    assert pair.stream.has_input()
    assert pair.stream.has_input()
    assert read_all(pair.stream, 4) == [b"answ", b"er"]
    assert not pair.stream.has_input()


@pytest.mark.parametrize("first", [b"", b"x" * 16384, b"y" * 40_000])
def test_has_input_loses_no_bytes(pair, first):
    pair.arrive(pair.peer.encrypted(*([first] if first else []), b"second"))
    assert pair.stream.has_input()
    assert b"".join(read_all(pair.stream)) == first + b"second"
    assert not pair.stream.readable


def test_unread_bytes_are_read_again(pair):
    pair.arrive(pair.peer.encrypted(b"first"))
    pair.stream.unread(pair.stream.read(16384))
    assert pair.stream.readable
    pair.arrive(pair.peer.encrypted(b"second"))
    assert read_all(pair.stream) == [b"first", b"second"]
    assert not pair.stream.readable


def test_an_end_or_an_error_found_by_has_input_is_returned_by_read(pair):
    with pytest.raises(ssl.SSLWantReadError):
        pair.peer.tls.unwrap()
    pair.arrive(pair.peer.outgoing.read())
    assert pair.stream.has_input()
    assert pair.stream.read(16384) == b""
    other = TlsPair()
    encrypted = bytearray(other.peer.encrypted(b"one"))
    encrypted[-1] ^= 1
    other.arrive(bytes(encrypted))
    for _ in range(2):
        assert other.stream.has_input()
        with pytest.raises(ssl.SSLError):
            other.stream.read(16384)
    other.close()


def test_the_session_can_be_resumed(pair):
    assert pair.stream.session is not None
    assert pair.stream.is_tls
    assert not Stream.is_tls


def test_sendmsg_joins_its_chunks(pair):
    assert pair.stream.sendmsg([b"head ", b"body"]) == 9
    pair.peer.pull()
    assert pair.peer.decrypted() == b"head body"


def test_a_full_socket_blocks_and_nothing_is_lost_or_sent_twice():
    pair = TlsPair(small=True)
    data = bytes(range(251)) * 4_000
    left, blocked = memoryview(data), 0
    received = b""
    while left:
        try:
            left = left[pair.stream.send(left) :]
        except BlockingIOError:
            blocked += 1
        pair.peer.pull(1 << 14)
        received += pair.peer.decrypted()
    assert blocked
    assert received + drain(pair) == data
    pair.close()


@pytest.mark.parametrize("size", [70_000, 1_000_000])
def test_large_chunks_are_sent_until_the_socket_is_full(size):
    pair = TlsPair(small=True)
    chunks = [b"head ", bytes(range(251)) * (size // 251)]
    sent = pair.stream.sendmsg(chunks)
    assert len(chunks[0]) <= sent < sum(map(len, chunks))
    left, received = memoryview(b"".join(chunks))[sent:], b""
    while left:
        pair.peer.pull(1 << 14)
        received += pair.peer.decrypted()
        with contextlib.suppress(BlockingIOError):
            left = left[pair.stream.send(left) :]
    assert received + drain(pair) == b"".join(chunks)
    pair.close()


def drain(pair: TlsPair) -> bytes:
    received = b""
    while True:
        try:
            pair.peer.incoming.write(pair.peer.sock.recv(1 << 20, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return received + pair.peer.decrypted()
        received += pair.peer.decrypted()


@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(1, 3 * PORTION_BYTES), min_size=1, max_size=6),
    pulls=st.lists(st.integers(1, 1 << 16), min_size=1, max_size=20),
)
def test_bytes_arrive_in_order_for_any_sizes_and_reader_pace(sizes, pulls):
    pair = TlsPair(small=True)
    received, sent, turn = b"", b"", 0
    for number, size in enumerate(sizes):
        chunk = bytes((number + at) % 251 for at in range(size))
        sent += chunk
        left = memoryview(chunk)
        while left:
            try:
                taken = pair.stream.send(left)
            except BlockingIOError:
                pair.peer.pull(pulls[turn % len(pulls)])
                turn += 1
            else:
                assert taken
                left = left[taken:]
            received += pair.peer.decrypted()
    assert received + drain(pair) == sent
    pair.close()


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(
    records=st.lists(st.binary(min_size=1, max_size=20_000), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 60_000), max_size=8),
    size=st.sampled_from([1_000, 16384, 262144]),
)
def test_bytes_arrive_in_order_however_the_records_are_cut(records, cuts, size):
    pair = TlsPair()
    encrypted = pair.peer.encrypted(*records)
    edges = sorted({0, len(encrypted), *(cut % (len(encrypted) + 1) for cut in cuts)})
    received = b""
    for start, end in pairwise(edges):
        pair.arrive(encrypted[start:end])
        received += b"".join(read_all(pair.stream, size))
        assert not pair.stream.readable
    assert received == b"".join(records)
    pair.close()


def test_a_broken_socket_is_an_error(pair):
    pair.peer.sock.close()
    with pytest.raises(OSError) as caught:
        pair.stream.send(b"x")
    assert caught.value.errno in (errno.EPIPE, errno.ECONNRESET)


def test_encrypted_bytes_after_send_eof_can_be_drained(pair):
    pair.peer.sock.sendall(pair.peer.encrypted(bytes(RECORD_BYTES)))
    pair.stream.readable = True
    assert pair.stream.read(RECORD_BYTES) == bytes(RECORD_BYTES)
    pair.stream.send_eof()
    assert pair.stream.read(ENCRYPTED_READ_BYTES) is None  # no bytes, but not the end
    encrypted = pair.peer.encrypted(bytes(100))
    pair.peer.sock.sendall(encrypted)
    assert pair.stream.read(ENCRYPTED_READ_BYTES) == encrypted


@pytest.mark.skipif(native.build() == "native", reason="compiled code is not specialized")
@pytest.mark.parametrize("name", ["on_event", "write_soon", "flush"])
def test_a_tls_stream_runs_its_own_copy_of_a_frequent_method(name):
    plain, copy = getattr(Stream, name), getattr(TlsStream, name)
    assert copy.__code__ is not plain.__code__
    assert copy.__code__ == plain.__code__
