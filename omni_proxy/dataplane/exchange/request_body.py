"""A request's body that did not come along with its head: held whole, or streamed to the worker.

Contract: it is held to its end, or until its worker can be known (routing.early). Streamed, at most
one piece of it is in our hands, the client is read only while the worker takes what it has, and
from the first byte that a worker got there is no second try. What all requests hold together is
bounded by `[server] max_held_bytes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ANY_STREAM, ClientDisconnected, pause
from omni_proxy.routing.inspect.large_json import LARGE_BYTES
from omni_proxy.wire.chunked import LAST_CHUNK, ChunkedBody, encode_chunk
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import CHUNKED, RequestHead

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection

PIECE_BYTES: Final = 262144
CHUNKED_PIECE_BYTES: Final = 16384  # of the smallest chunks 10 ms of work
LARGE_CHUNKS_PIECE_BYTES: Final = 65536  # where they were large so far
LARGE_CHUNK_BYTES: Final = 1024
SMALL_PIECE_BYTES: Final = 4096
CHUNKS_PER_READ: Final = 16  # take as long as a read


class RequestBody:
    """The body of one request. `whole`: its last byte has come; `poured`: a worker got some of it.

    Whatever reads raises HttpError 400 for broken chunks, 413 past the limit, 503 where too much is
    held; Expired when the client stops, ClientDisconnected when it leaves.
    """

    __slots__ = (
        "_conn", "_held", "_left", "_mine", "_out", "_piece_bytes", "_reader", "held_bytes",
        "poured", "whole",
    )  # fmt: skip

    def __init__(self, conn: Connection, mine: Exchange, head: RequestHead, limit: int) -> None:
        self.whole = self.poured = False
        self.held_bytes = 0
        self._conn = conn
        self._mine = mine
        self._held: list[bytes | bytearray] = []
        self._left = head.length  # of a counted body
        self._reader = ChunkedBody(limit) if head.length == CHUNKED else None
        self._piece_bytes = CHUNKED_PIECE_BYTES if self._reader is not None else PIECE_BYTES
        self._out = memoryview(b"")  # of what was read, what the worker has not taken yet
        came, conn.rest = conn.rest, b""
        self._hold(self._payload_in(came))

    @property
    def beginning(self) -> bytes:
        """What is held so far."""
        return b"".join(self._held)

    async def hold(self, most: int) -> bool:
        """Read until it is whole or more than `most` bytes are held; whether it is whole."""
        while not self.whole and self.held_bytes <= most:
            self._hold(self._payload_in(await self._read()))
        return self.whole

    async def hold_all(self) -> None:
        """Raises HttpError 503 at once where the length that was told can't be held."""
        if self._left > 0:
            self._conn.door.check_room(self._left)
        while not self.whole:
            self._hold(self._payload_in(await self._read()))

    def take(self) -> bytes:
        """What is held; it is the caller's now."""
        held, self._held = self._held, []
        if len(held) != 1:
            return b"".join(held)
        if self.held_bytes > LARGE_BYTES:  # whoever reads or sends it does not mind
            return cast("bytes", held[0])
        return bytes(held[0])

    def held_whole(self) -> bytes:
        """The same, to be looked at; it stays here."""
        whole = self.take()
        self._held = [whole]
        return whole

    def begin(self, lines: bytes) -> bytes:
        """The head with our framing. From here on what is held can be poured only."""
        body = self.take()
        self._conn.let_go()
        self.poured = True
        if self._reader is None:
            self._out = memoryview(body)
            return b"%bcontent-length: %d\r\n\r\n" % (lines, len(body) + self._left)
        self._out = memoryview(self._chunked(body))
        return b"%btransfer-encoding: chunked\r\n\r\n" % lines

    async def pour(self, up: Stream) -> bool:
        """The rest of it to the worker; False where that has something to say before, or broke."""
        while await self._flush(up):
            if self.whole:
                return True
            piece = await self._read_beside(up)
            if piece is None:
                break
            payload = self._payload_in(piece)
            self._out = memoryview(payload if self._reader is None else self._chunked(payload))
        return False

    def _chunked(self, payload: bytes) -> bytes:
        framed = encode_chunk(payload) if payload else b""
        return framed + LAST_CHUNK if self.whole else framed

    def _payload_in(self, came: bytes) -> bytes:
        """What of it is the body's; what stands behind its end is the next request's."""
        reader, conn = self._reader, self._conn
        if reader is None:
            payload = came[: self._left]
            self._left -= len(payload)
            self.whole = not self._left
            conn.rest = came[len(payload) :]
        else:
            reader.feed(came)
            chunks = len(reader.payload)
            conn.reads_since_pause += chunks // CHUNKS_PER_READ
            payload = b"".join(reader.payload)
            large = len(payload) >= max(chunks, 1) * LARGE_CHUNK_BYTES
            self._piece_bytes = LARGE_CHUNKS_PIECE_BYTES if large else CHUNKED_PIECE_BYTES
            reader.payload.clear()
            self.whole = reader.whole
            if self.whole:
                conn.rest = reader.rest
        self._mine.bytes_in += len(payload)
        if self.whole:
            self._mine.body_at = conn.loop.now
        return payload

    def _hold(self, payload: bytes) -> None:
        if payload:
            self._conn.hold(len(payload))
            self.held_bytes += len(payload)
            self._keep(payload)

    def _keep(self, payload: bytes) -> None:
        """Small pieces together: each of its own would take many times its length."""
        held = self._held
        if self.held_bytes > LARGE_BYTES:  # grows where it is: to join it at its end takes too long
            if len(held) != 1 or not isinstance(held[0], bytearray):
                held[:] = [bytearray().join(held)]
            held[0] += payload
        elif len(payload) >= SMALL_PIECE_BYTES:
            held.append(payload)
        elif held and isinstance(held[-1], bytearray):
            held[-1] += payload
        else:
            held.append(bytearray(payload))

    async def _read(self) -> bytes:
        conn = self._conn
        conn.clock("body", conn.door.limits.client_body)
        try:
            piece = await conn.more(conn.client, self._piece_bytes)
        except OSError:
            raise ClientDisconnected from None
        if not piece:
            raise ClientDisconnected
        return piece

    async def _read_beside(self, up: Stream) -> bytes | None:
        """As `_read`; None where the worker was first to say something."""
        conn, client = self._conn, self._conn.client
        conn.clock("body", conn.door.limits.client_body)
        while not up.has_input():
            if conn.must_wait_for(client):
                if not client.readable:
                    conn.waiting_on = ANY_STREAM
                await pause
                continue
            try:
                piece = client.read(self._piece_bytes)
            except OSError:
                raise ClientDisconnected from None
            if piece == b"":
                raise ClientDisconnected
            if piece is not None:
                return piece
        return None

    async def _flush(self, up: Stream) -> bool:
        """What was read to the worker, however long that takes; False as in `pour`."""
        conn = self._conn
        if self._out:
            conn.clock("send", conn.door.limits.response_head)
        while self._out:
            if up.has_input():
                return False
            try:
                self._out = self._out[up.send(self._out) :]
            except BlockingIOError:
                conn.waiting_on = up
                await pause
            except OSError:
                up.readable = True  # its answer, or its end, is waiting to be read
                return False
        return True


def too_much_held() -> HttpError:
    """The error of omni-router.md 10 for bodies that would not fit beside the others."""
    return HttpError(
        503, "router overloaded: too many bytes of request bodies are held", 503,
        close=True, type="overloaded_error", reason="max_held_bytes",
    ).with_headers(("retry-after", "1"))  # fmt: skip
