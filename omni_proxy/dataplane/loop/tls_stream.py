"""TLS on a socket of the event loop: the handshake, and a `Stream` that is encrypted on the wire.

OpenSSL reads and writes two memory buffers rather than the socket, so an event costs one system
call, as without TLS. Invariant: encrypted bytes are sent in order, and `send` counts only bytes
that the socket has accepted, so timeouts and back-pressure follow the client's pace. A connection
that ends without TLS's close_notify is an error, never a regular end (RFC 8446, 6.1).
"""

from __future__ import annotations

import contextlib
import errno
import ssl
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Final

from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask, pause

RECORD_BYTES: Final = 16384  # maximum payload of a TLS record
ENCRYPTED_READ_BYTES: Final = 2 * RECORD_BYTES  # maximum of one read
PORTION_BYTES: Final = 65536  # encrypted in one call, so also the maximum of `unsent_size`
RECORD: Final = b"\x16"  # the first byte of a handshake


class TlsHandshake:
    """OpenSSL's state of one connection, with the memory buffers that it reads and writes."""

    __slots__ = ("incoming", "outgoing", "tls")

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        server_name: str | None = None,
        session: ssl.SSLSession | None = None,
    ) -> None:
        """`server_name`: the server to connect to as a client; None for the server side."""
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
        """Do the handshake. The result replaces `plain`, which must not be used any more. Raises
        OSError."""
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
                plain.send(self.outgoing.read())  # the alert with the reason
            raise
        return True


async def read_handshake_bytes(task: ConnectionTask, plain: Stream) -> bytes:
    """Wait for more bytes. Raises OSError, also if the peer closes."""
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


def _reset(reason: str) -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, reason)


class TlsWriter:
    """Encrypts what a stream sends. A separate object, so that a stream can store its `send` like
    that of a plain socket.

    `unsent`: encrypted bytes that the socket did not accept, of `unsent_size` bytes of plaintext.
    """

    __slots__ = ("_encrypt", "_outgoing", "_send", "unsent", "unsent_size")

    def __init__(self, handshake: TlsHandshake, send: Callable[[bytes], int]) -> None:
        self._outgoing = handshake.outgoing
        self._encrypt = handshake.tls.write
        self._send = send
        self.unsent = b""
        self.unsent_size = 0

    def send(self, chunk: bytes | bytearray | memoryview) -> int:
        """Returns how many bytes of `chunk` the socket has accepted. Raises OSError."""
        size = len(chunk)
        if self.unsent or size > PORTION_BYTES:
            return self._send_in_portions(memoryview(chunk))
        encrypt = self._encrypt  # a local, as in `Stream.read`
        encrypt(chunk)
        self._send_encrypted(self._outgoing.read(), size)
        return size

    def _send_encrypted(self, encrypted: bytes, size: int) -> None:
        """`size`: the number of plaintext bytes.

        Raises BlockingIOError if the socket did not accept all bytes.
        """
        send = self._send
        try:
            sent = send(encrypted)
        except BlockingIOError:
            sent = 0
        if sent < len(encrypted):
            self.unsent, self.unsent_size = encrypted[sent:], size
            raise BlockingIOError

    def _send_in_portions(self, view: memoryview) -> int:
        """Send until the socket is full: only then does epoll report when it is writable."""
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
        """Send OpenSSL's reply to the peer (e.g. to a key update), unless bytes are unsent: then it
        is sent after them."""
        if not self.unsent:
            with contextlib.suppress(OSError):  # the next read raises it
                self._send_encrypted(self._outgoing.read(), 0)

    def send_alerts(self) -> None:
        """Send TLS messages: close_notify or an alert."""
        messages = self._outgoing.read()
        if messages and not self.unsent:
            with contextlib.suppress(OSError):
                self._send(messages)


class TlsStream(Stream):
    """An encrypted stream, which replaces the plain stream of the handshake.

    Once `send` has raised BlockingIOError, the next call must begin with the same bytes.
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
        # `Stream.__init__` is not called: it would register the socket a second time.
        self.loop = plain.loop
        self.sock = plain.sock
        self.fd = plain.fd
        self.recv = plain.recv
        self.readable = True  # the first request may have arrived with the handshake
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
        self._has_encrypted = True  # OpenSSL may have enough encrypted bytes for another record
        self._decrypted = b""  # decrypted by `has_input`, for the next read
        plain.closed = True
        self.loop.replace_handler(self.fd, self)

    @property
    def context(self) -> ssl.SSLContext:
        return self._tls.context

    @property
    def session(self) -> ssl.SSLSession | None:
        """The session for resumption, which shortens the next handshake with the same server."""
        return self._tls.session

    def read(self, size: int) -> bytes | None:
        """As `Stream.read`; b"" after the peer's close_notify. Raises OSError."""
        drained = False
        if not self._has_encrypted:
            recv = self.recv
            try:
                encrypted = recv(ENCRYPTED_READ_BYTES)
            except BlockingIOError:
                self.readable = False
                return None
            if not encrypted:
                raise _reset("the connection was closed without close_notify")
            self._incoming.write(encrypted)
            drained = len(encrypted) < ENCRYPTED_READ_BYTES and not self.peer_closed
        decrypt = self._decrypt
        try:
            chunk = decrypt(size)
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
        """Decrypts, because the received bytes may be TLS messages without data; stores the data
        for the next read."""
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
        """Replaces OpenSSL's read: returns the bytes that `has_input` has decrypted."""
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
        return done  # less than all only if the socket is full, see `_send_in_portions`

    def send_eof(self) -> None:
        """Close the sending side. Afterwards `read` returns encrypted bytes, only for draining."""
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
        """Send close_notify; without it the peer treats the close as a truncated connection."""
        if not self._writer.unsent:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()  # raises, because the peer's close_notify is not awaited
            self._writer.send_alerts()


def _copy_methods(names: Sequence[str]) -> None:
    """Give `TlsStream` its own copies of methods of `Stream`.

    CPython 3.11 specializes the bytecodes of a function for one class (PEP 659). If streams of both
    classes alternate in one function, its attributes are looked up the slow way.
    """
    for name in names:
        method = getattr(Stream, name)
        if isinstance(method, FunctionType):  # not in the native build
            setattr(TlsStream, name, FunctionType(method.__code__.replace(), method.__globals__))


_copy_methods(("on_event", "write_soon", "flush"))
