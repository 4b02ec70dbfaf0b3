"""A request body that did not come along with its head: held whole, or streamed to the worker.

Contract: it is held to its end, or until its worker can be chosen (routing.inspect.streamed).
Streamed, at most one chunk of it is in memory, the client is read only while the worker takes what
there is, and from the first byte that a worker got there is no retry. What all requests hold
together is bounded by `[server] max_held_bytes`.
"""

from __future__ import annotations

from typing import Final, cast

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ANY_STREAM, ClientDisconnected, pause
from omni_proxy.routing.inspect.large_json import LARGE_BYTES
from omni_proxy.wire.chunked import LAST_CHUNK, ChunkedBody, encode_chunk
from omni_proxy.wire.request import CHUNKED, RequestHead

READ_BYTES: Final = 262144
CHUNKED_READ_BYTES: Final = 16384  # of the smallest chunks 10 ms of work
LARGE_CHUNKS_READ_BYTES: Final = 65536  # where they were large so far
LARGE_CHUNK_BYTES: Final = 1024
SMALL_CHUNK_BYTES: Final = 4096
CHUNKS_PER_READ: Final = 16  # take as long as a read


class RequestBody:
    """The body of one request. `whole`: its last byte has come; `poured`: a worker got some of it.

    Methods that read raise HttpError 400 for broken chunks, 413 past the limit, 503 where too much
    is held; PhaseTimeout when the client stops sending, ClientDisconnected when it leaves.
    """

    __slots__ = (
        "_exchange", "_held", "_io", "_left", "_out", "_read_bytes", "_reader", "held_bytes",
        "poured", "whole",
    )  # fmt: skip

    def __init__(self, io: ExchangeIO, exchange: Exchange, head: RequestHead, limit: int) -> None:
        self.whole = self.poured = False
        self.held_bytes = 0
        self._io = io
        self._exchange = exchange
        self._held: list[bytes | bytearray] = []
        self._left = head.length  # of a counted body
        self._reader = ChunkedBody(limit) if head.length == CHUNKED else None
        self._read_bytes = CHUNKED_READ_BYTES if self._reader is not None else READ_BYTES
        self._out = memoryview(b"")  # of what was read, what the worker has not taken yet
        received, io.rest = io.rest, b""
        self._hold(self._payload_in(received))

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
        """Raises HttpError 503 at once where its content-length can't be held."""
        if self._left > 0:
            self._io.services.inflight.check_room(self._left)
        while not self.whole:
            self._hold(self._payload_in(await self._read()))

    def take(self) -> bytes:
        """What is held; it is not kept here any more."""
        held, self._held = self._held, []
        if len(held) != 1:
            return b"".join(held)
        if self.held_bytes > LARGE_BYTES:  # a bytearray does as well
            return cast("bytes", held[0])
        return bytes(held[0])

    def held_whole(self) -> bytes:
        """The same, which stays held."""
        whole = self.take()
        self._held = [whole]
        return whole

    def start_stream(self, lines: bytes) -> bytes:
        """The head, framed anew. From here on what is held can only be streamed."""
        body = self.take()
        self._io.services.inflight.release_bytes(self._exchange)
        self.poured = True
        if self._reader is None:
            self._out = memoryview(body)
            return b"%bcontent-length: %d\r\n\r\n" % (lines, len(body) + self._left)
        self._out = memoryview(self._chunked(body))
        return b"%btransfer-encoding: chunked\r\n\r\n" % lines

    async def stream_to(self, upstream: Stream) -> bool:
        """Send the rest to the worker; False where that responds before the end, or broke."""
        while await self._flush(upstream):
            if self.whole:
                return True
            chunk = await self._read_unless_response(upstream)
            if chunk is None:
                break
            payload = self._payload_in(chunk)
            self._out = memoryview(payload if self._reader is None else self._chunked(payload))
        return False

    def _chunked(self, payload: bytes) -> bytes:
        framed = encode_chunk(payload) if payload else b""
        return framed + LAST_CHUNK if self.whole else framed

    def _payload_in(self, received: bytes) -> bytes:
        """The part that is of the body; what follows its end belongs to the next request."""
        reader, io = self._reader, self._io
        if reader is None:
            payload = received[: self._left]
            self._left -= len(payload)
            self.whole = not self._left
            io.rest = received[len(payload) :]
        else:
            reader.feed(received)
            chunks = len(reader.payload)
            io.reads_since_pause += chunks // CHUNKS_PER_READ
            payload = b"".join(reader.payload)
            large = len(payload) >= max(chunks, 1) * LARGE_CHUNK_BYTES
            self._read_bytes = LARGE_CHUNKS_READ_BYTES if large else CHUNKED_READ_BYTES
            reader.payload.clear()
            self.whole = reader.whole
            if self.whole:
                io.rest = reader.rest
        self._exchange.bytes_in += len(payload)
        if self.whole:
            self._exchange.body_at = io.loop.now
        return payload

    def _hold(self, payload: bytes) -> None:
        if payload:
            self._io.services.inflight.hold(self._exchange, len(payload))
            self.held_bytes += len(payload)
            self._keep(payload)

    def _keep(self, payload: bytes) -> None:
        """Small chunks are joined: each by itself would take many times its length."""
        held = self._held
        if self.held_bytes > LARGE_BYTES:  # grows in place: joining at the end takes too long
            if len(held) != 1 or not isinstance(held[0], bytearray):
                held[:] = [bytearray().join(held)]
            held[0] += payload
        elif len(payload) >= SMALL_CHUNK_BYTES:
            held.append(payload)
        elif held and isinstance(held[-1], bytearray):
            held[-1] += payload
        else:
            held.append(bytearray(payload))

    async def _read(self) -> bytes:
        io = self._io
        io.set_timeout("body", io.settings.limits.client_body)
        try:
            chunk = await io.read(io.client, self._read_bytes)
        except OSError:
            raise ClientDisconnected from None
        if not chunk:
            raise ClientDisconnected
        return chunk

    async def _read_unless_response(self, upstream: Stream) -> bytes | None:
        """As `_read`; None where the worker was first to respond."""
        io, client = self._io, self._io.client
        io.set_timeout("body", io.settings.limits.client_body)
        while not upstream.has_input():
            if io.must_wait_for(client):
                if not client.readable:
                    io.waiting_on = ANY_STREAM
                await pause
                continue
            try:
                chunk = client.read(self._read_bytes)
            except OSError:
                raise ClientDisconnected from None
            if chunk == b"":
                raise ClientDisconnected
            if chunk is not None:
                return chunk
        return None

    async def _flush(self, upstream: Stream) -> bool:
        """Send what was read to the worker, however long that takes; False as in `stream_to`."""
        io = self._io
        if self._out:
            io.set_timeout("send", io.settings.limits.response_head)
        while self._out:
            if upstream.has_input():
                return False
            try:
                self._out = self._out[upstream.send(self._out) :]
            except BlockingIOError:
                io.waiting_on = upstream
                await pause
            except OSError:
                upstream.readable = True  # its response, or its end, is waiting to be read
                return False
        return True
