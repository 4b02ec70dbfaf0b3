"""TLS on a socket of the event loop: the handshake, and a `Stream` that is encrypted on the wire.

OpenSSL works on two memory buffers and never sees the socket, so an event costs one system call, as
it does without TLS. Invariant: encrypted bytes leave in their order, and `send` counts only what
the socket has taken, so timeouts and back-pressure follow the client's own pace. A connection that
ends without TLS's close_notify is an error, never a regular end (RFC 8446, 6.1).
"""

from __future__ import annotations

import contextlib
import errno
import ssl
from collections.abc import Callable, Sequence
from typing import Final

from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask, pause

RECORD_BYTES: Final = 16384  # the most that a TLS record holds
ENCRYPTED_READ_BYTES: Final = 2 * RECORD_BYTES  # at most, in one read
PORTION_BYTES: Final = 65536  # encrypted at once; also the most that waits while the socket is full
RECORD: Final = b"\x16"  # the first byte of a handshake


class TlsHandshake:
    """OpenSSL's state of one connection, with the buffers that it reads from and writes to."""

    __slots__ = ("incoming", "outgoing", "tls")

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        server_name: str | None = None,
        session: ssl.SSLSession | None = None,
    ) -> None:
        """As a client of `server_name`; without one as a server."""
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
        """Shake hands; from then on `plain` belongs to the result. Raises OSError."""
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
                plain.send(self.outgoing.read())  # the alert that tells why
            raise
        return True


async def read_handshake_bytes(task: ConnectionTask, plain: Stream) -> bytes:
    """Wait for more bytes. Raises OSError, also when the peer closes."""
    while True:
        if task.must_wait_for(plain):
            await pause
        chunk = plain.read(ENCRYPTED_READ_BYTES)
        if chunk:
            return chunk
        if chunk is not None:
            raise _reset("the connection was closed during the TLS handshake")


async def _send_all(task: ConnectionTask, plain: Stream, chunk: bytes) -> None:
    while chunk:
        try:
            chunk = chunk[plain.send(chunk) :]
        except BlockingIOError:
            task.waiting_on = plain
            await pause


def _reset(why: str) -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, why)


class TlsWriter:
    """Encrypts what a stream sends. An object of its own: so a stream can hold its `send` as it
    holds that of a plain socket.

    `unsent`: encrypted bytes that the socket did not take, of `unsent_size` bytes of the caller.
    """

    __slots__ = ("_encrypt", "_outgoing", "_send", "unsent", "unsent_size")

    def __init__(self, handshake: TlsHandshake, send: Callable[[bytes], int]) -> None:
        self._outgoing = handshake.outgoing
        self._encrypt = handshake.tls.write
        self._send = send
        self.unsent = b""
        self.unsent_size = 0

    def send(self, chunk: bytes | bytearray | memoryview) -> int:
        """How many bytes of `chunk` the socket has taken. Raises OSError."""
        size = len(chunk)
        if self.unsent or size > PORTION_BYTES:
            return self._send_in_portions(memoryview(chunk))
        self._encrypt(chunk)
        self._send_encrypted(self._outgoing.read(), size)
        return size

    def _send_encrypted(self, encrypted: bytes, size: int) -> None:
        """`size`: how many of the caller's bytes these are.

        Raises BlockingIOError where the socket did not take all.
        """
        try:
            sent = self._send(encrypted)
        except BlockingIOError:
            sent = 0
        if sent < len(encrypted):
            self.unsent, self.unsent_size = encrypted[sent:], size
            raise BlockingIOError

    def _send_in_portions(self, view: memoryview) -> int:
        """Goes on until the socket is full: only then epoll reports when it is writable."""
        done = self._send_unsent() if self.unsent else 0
        while done < len(view):
            portion = view[done : done + PORTION_BYTES]
            self._encrypt(portion)
            try:
                self._send_encrypted(self._outgoing.read(), len(portion))
            except BlockingIOError:
                if not done:
                    raise
                break
            done += len(portion)
        return done

    def _send_unsent(self) -> int:
        """Send `unsent`. Raises BlockingIOError while the socket is full."""
        self.unsent = self.unsent[self._send(self.unsent) :]
        if self.unsent:
            raise BlockingIOError
        return self.unsent_size

    def send_reply(self) -> None:
        """Answer the peer's TLS (e.g. a key update), behind what waits to be sent."""
        if not self.unsent:
            with contextlib.suppress(OSError):  # the next read raises it
                self._send_encrypted(self._outgoing.read(), 0)

    def send_alerts(self) -> None:
        """Send TLS's own messages: close_notify or an alert."""
        messages = self._outgoing.read()
        if messages and not self.unsent:
            with contextlib.suppress(OSError):
                self._send(messages)


class TlsStream(Stream):
    """Takes the place of the plain stream that the handshake was made on.

    Once `send` has raised BlockingIOError, the next call has to begin with the same bytes.
    """

    __slots__ = (
        "_decrypt",
        "_decrypted",
        "_has_encrypted",
        "_incoming",
        "_outgoing",
        "_tls",
        "_writer",
    )  # fmt: skip

    is_tls = True

    def __init__(self, plain: Stream, handshake: TlsHandshake) -> None:
        # Not `Stream.__init__`, which registers the socket: it is registered, and stays so.
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
        self._tls = handshake.tls
        self._incoming = handshake.incoming
        self._outgoing = handshake.outgoing
        self._decrypt: Callable[[int], bytes] = handshake.tls.read
        self._writer = TlsWriter(handshake, plain.send)
        self.send = self._writer.send
        self._has_encrypted = True  # encrypted bytes were read that may hold a whole record
        self._decrypted = b""  # decrypted by `has_input`, for the next read
        plain.closed = True
        self.loop.replace_handler(self.fd, self)

    @property
    def context(self) -> ssl.SSLContext:
        return self._tls.context

    @property
    def session(self) -> ssl.SSLSession | None:
        """For resumption: makes the next handshake with the same server shorter."""
        return self._tls.session

    def read(self, size: int) -> bytes | None:
        """As `Stream.read`; b"" after the peer's close_notify. Raises OSError."""
        drained = False
        if not self._has_encrypted:
            try:
                encrypted = self.recv(ENCRYPTED_READ_BYTES)
            except BlockingIOError:
                self.readable = False
                return None
            if not encrypted:
                raise _reset("the connection was closed without close_notify")
            self._incoming.write(encrypted)
            drained = len(encrypted) < ENCRYPTED_READ_BYTES and not self.peer_closed
        try:
            chunk = self._decrypt(size)
        except ssl.SSLWantReadError:
            self._has_encrypted = False
            self.readable = not drained
            if self._outgoing.pending:
                self._writer.send_reply()
            return None
        except ssl.SSLError:
            self._has_encrypted = True  # the next read raises it again
            self._writer.send_alerts()
            raise
        # The next read after the end returns b"" again.
        self._has_encrypted = has_more = (
            len(chunk) == size or self._incoming.pending > 0 or not chunk
        )
        self.readable = has_more or not drained
        return chunk

    def has_input(self) -> bool:
        """Decrypts, since what came may be for TLS alone; keeps the bytes that it finds."""
        while self.readable and not self._decrypted:
            try:
                decrypted = self.read(RECORD_BYTES)
            except OSError:
                return True
            if decrypted == b"":
                return True
            if decrypted:
                self.unread(decrypted)
        return self.readable

    def unread(self, chunk: bytes) -> None:
        self._decrypted = chunk
        self._decrypt, self._has_encrypted, self.readable = self._read_decrypted, True, True

    def _read_decrypted(self, size: int) -> bytes:
        """In the place of OpenSSL's read: returns what `has_input` has decrypted."""
        chunk, self._decrypted = self._decrypted[:size], self._decrypted[size:]
        if not self._decrypted:
            self._decrypt = self._tls.read
        return chunk

    def sendmsg(self, chunks: Sequence[bytes | memoryview]) -> int:
        if sum(map(len, chunks)) <= PORTION_BYTES:
            return self.send(b"".join(chunks))
        done = 0
        for chunk in chunks:  # joining them would copy a large body
            try:
                sent = self.send(chunk)
            except BlockingIOError:
                if not done:
                    raise
                break
            done += sent
            if sent < len(chunk):
                break
        return done  # less than all only where the socket is full, see `_send_in_portions`

    def send_eof(self) -> None:
        """From here on `read` returns encrypted bytes as they come: only good for draining."""
        self._send_close_notify()
        self._decrypt = self._incoming.read
        self._has_encrypted = self._incoming.pending > 0  # what OpenSSL itself has buffered is lost
        super().send_eof()

    def close(self, *, reset: bool = False) -> None:
        if not self.closed and not reset:
            self.flush()
            self._send_close_notify()
        super().close(reset=reset)

    def _send_close_notify(self) -> None:
        """Send close_notify; without it the peer takes the close for a cut connection."""
        if not self._writer.unsent:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()  # raises: the peer's close_notify is not waited for
            self._writer.send_alerts()
