"""TLS over a socket of the pump: the handshake, and a `Stream` whose bytes are sealed on the wire.

OpenSSL works on two memory buffers and never sees the socket: one system call per event, as without
TLS, where it would itself make three per record (measured: 5 us for a small record sent and read,
against 10 with `SSLSocket`; 3 without TLS). Invariant: bytes that were sealed leave in their order,
and `send` counts only what the socket has taken, so clocks and back-pressure see the client's own
pace. An end that TLS did not announce is an error, never an end.
"""

from __future__ import annotations

import contextlib
import errno
import ssl
from collections.abc import Callable
from typing import Final

from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask, pause

RECORD_BYTES: Final = 16384  # the most that one holds
SEALED_BYTES: Final = 2 * RECORD_BYTES  # read at once
PORTION_BYTES: Final = 65536  # sealed at once, and waiting when the socket is full
RECORD: Final = b"\x16"  # what a handshake begins with


class TlsHandshake:
    """OpenSSL's side of one connection, with the memory that it reads from and writes to."""

    __slots__ = ("incoming", "outgoing", "tls")

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        server_name: str | None = None,
        session: ssl.SSLSession | None = None,
    ) -> None:
        """As a client towards `server_name`; without one as a server."""
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.tls = context.wrap_bio(
            self.incoming,
            self.outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
            session=session,
        )

    async def run(self, task: ConnectionTask, plain: Stream) -> TlsStream:
        """Until both sides agree; `plain` is the result's from then on. Raises OSError."""
        while True:
            done = self._advance(plain)
            if self.outgoing.pending:
                await _send_all(task, plain, self.outgoing.read())
            if done:
                return TlsStream(plain, self)
            self.incoming.write(await read_handshake_bytes(task, plain))

    def _advance(self, plain: Stream) -> bool:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError:
            with contextlib.suppress(OSError):
                plain.send(self.outgoing.read())  # why not, in TLS's own words
            raise
        return True


async def read_handshake_bytes(task: ConnectionTask, plain: Stream) -> bytes:
    """What comes next. Raises OSError, also at the end."""
    while True:
        if task.must_wait_for(plain):
            await pause
        piece = plain.read(SEALED_BYTES)
        if piece:
            return piece
        if piece is not None:
            raise _reset("the connection was closed during the TLS handshake")


async def _send_all(task: ConnectionTask, plain: Stream, piece: bytes) -> None:
    while piece:
        try:
            piece = piece[plain.send(piece) :]
        except BlockingIOError:
            task.waiting_on = plain
            await pause


def _reset(why: str) -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, why)


class TlsStream(Stream):
    """In the place of the plain connection that the handshake was made on.

    Once `send` has raised BlockingIOError, the next one has to begin with the same bytes.
    """

    __slots__ = (
        "_ahead", "_incoming", "_inside", "_open", "_outgoing", "_owed", "_seal", "_send", "_tls",
        "_unsent",
    )  # fmt: skip

    is_tls = True

    def __init__(self, plain: Stream, shaken: TlsHandshake) -> None:
        # Not that of `Stream`, which registers the socket: it is in the set, and keeps its events.
        self.loop = plain.loop
        self.sock = plain.sock
        self.fd = plain.fd
        self.recv = plain.recv
        self.readable = True  # the first request may have come along with the handshake
        self.peer_closed = plain.peer_closed
        self.closed = plain.closed
        self.pending = b""
        self.task = plain.task
        self.idle_since = 0.0
        self.on_idle_event = None
        self._tls = shaken.tls
        self._incoming = shaken.incoming
        self._outgoing = shaken.outgoing
        self._open: Callable[[int], bytes] = shaken.tls.read
        self._seal = shaken.tls.write
        self._send = plain.send
        self._inside = True  # sealed bytes are in memory that may be a whole record
        self._unsent = b""  # sealed, and not taken by the socket yet
        self._ahead = b""  # opened before anybody asked for it
        self._owed = 0  # how many bytes of a caller's those are
        plain.closed = True
        self.loop.replace_handler(self.fd, self)

    @property
    def context(self) -> ssl.SSLContext:
        return self._tls.context

    @property
    def session(self) -> ssl.SSLSession | None:
        """What makes the next handshake with the same server a short one."""
        return self._tls.session

    def read(self, size: int) -> bytes | None:
        """As `Stream.read`; b"" where the peer has said that it is done. Raises OSError."""
        drained = False
        if not self._inside:
            try:
                sealed = self.recv(SEALED_BYTES)
            except BlockingIOError:
                self.readable = False
                return None
            if not sealed:
                raise _reset("the connection was cut, and TLS was not told")
            self._incoming.write(sealed)
            drained = len(sealed) < SEALED_BYTES and not self.peer_closed
        try:
            piece = self._open(size)
        except ssl.SSLWantReadError:
            self._inside = False
            self.readable = not drained
            if self._outgoing.pending:
                self._reply()
            return None
        except ssl.SSLError:
            self._inside = True  # whoever reads again gets it again
            self._flush_words()
            raise
        # An end is given again, too.
        self._inside = inside = len(piece) == size or self._incoming.pending > 0 or not piece
        self.readable = inside or not drained
        return piece

    def has_input(self) -> bool:
        """What came may have been for TLS alone: looks into it, and keeps what it finds."""
        while self.readable and not self._ahead:
            try:
                found = self.read(RECORD_BYTES)
            except OSError:
                return True
            if found == b"":
                return True
            if found:
                self.unread(found)
        return self.readable

    def unread(self, piece: bytes) -> None:
        self._ahead = piece
        self._open, self._inside, self.readable = self._give, True, True

    def _give(self, size: int) -> bytes:
        """Instead of OpenSSL: what was found by looking ahead."""
        piece, self._ahead = self._ahead[:size], self._ahead[size:]
        if not self._ahead:
            self._open = self._tls.read
        return piece

    def send(self, piece: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """How many bytes of `piece` the socket has taken. Raises OSError."""
        size = len(piece)
        if self._unsent or size > PORTION_BYTES:
            return self._send_by_portions(memoryview(piece))
        self._seal(piece)
        self._put(self._outgoing.read(), size)
        return size

    def _put(self, sealed: bytes, size: int) -> None:
        """`size` bytes of a caller's. Raises BlockingIOError where the socket did not take all."""
        try:
            sent = self._send(sealed)
        except BlockingIOError:
            sent = 0
        if sent < len(sealed):
            self._unsent, self._owed = sealed[sent:], size
            raise BlockingIOError

    def _send_by_portions(self, view: memoryview) -> int:
        """Until the socket is full: only then its readiness will be told."""
        done = self._settle_debt() if self._unsent else 0
        while done < len(view):
            portion = view[done : done + PORTION_BYTES]
            self._seal(portion)
            try:
                self._put(self._outgoing.read(), len(portion))
            except BlockingIOError:
                if not done:
                    raise
                break
            done += len(portion)
        return done

    def sendmsg(self, pieces: list[bytes]) -> int:
        if sum(map(len, pieces)) <= PORTION_BYTES:
            return self.send(b"".join(pieces))
        done = 0
        for piece in pieces:  # to join them would copy a large body
            try:
                sent = self.send(piece)
            except BlockingIOError:
                if not done:
                    raise
                break
            done += sent
            if sent < len(piece):
                break
        return done  # less than all of it only where the socket is full: see `_send_by_portions`

    def _settle_debt(self) -> int:
        """Raises BlockingIOError while the socket is full."""
        self._unsent = self._unsent[self._send(self._unsent) :]
        if self._unsent:
            raise BlockingIOError
        return self._owed

    def send_eof(self) -> None:
        """From here on `read` gives what comes as it comes: it is only to be drained."""
        self._say_goodbye()
        self._open = self._incoming.read
        self._inside = self._incoming.pending > 0  # what OpenSSL itself holds is lost
        super().send_eof()

    def close(self, *, reset: bool = False) -> None:
        if not self.closed and not reset:
            self.flush()
            self._say_goodbye()
        super().close(reset=reset)

    def _say_goodbye(self) -> None:
        """Without it a cut could not be told from an end."""
        if not self._unsent:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()  # also asks for the peer's own word, which we don't wait for
            self._flush_words()

    def _reply(self) -> None:
        """What the peer's TLS has asked of ours, and may wait for; nothing overtakes what waits."""
        if not self._unsent:
            with contextlib.suppress(OSError):  # the next read tells
                self._put(self._outgoing.read(), 0)

    def _flush_words(self) -> None:
        """What TLS itself has to say: a goodbye, or what it did not like."""
        words = self._outgoing.read()
        if words and not self._unsent:
            with contextlib.suppress(OSError):
                self._send(words)
