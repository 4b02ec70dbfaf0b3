"""A request body that did not arrive with its head: held completely, or streamed to the worker.

Contract: it is held to its end, or until its worker can be chosen (`upstream.fleet_requirements`).
While it is streamed, at most one chunk is in memory, the client is read only when the worker has
accepted all previous bytes, and there is no retry after the first byte sent. `[server]
max_held_bytes` bounds the bytes held by all requests together.
"""

from __future__ import annotations

from typing import Final, cast

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ANY_STREAM, ClientDisconnected, pause
from omni_proxy.routing.inspect.large_json import LARGE_BYTES
from omni_proxy.wire.chunked import LAST_CHUNK, ChunkedBody, encode_chunk
from omni_proxy.wire.request import CHUNKED, RequestHead

READ_BYTES: Final = 262144
CHUNKED_READ_BYTES: Final = 16384  # bounds the work of one read if the chunks are tiny
LARGE_CHUNKS_READ_BYTES: Final = 65536  # if the last chunks were large
LARGE_CHUNK_BYTES: Final = 1024
SMALL_CHUNK_BYTES: Final = 4096
CHUNKS_PER_READ: Final = 16  # parsing this many chunks costs as much as a read


class RequestBody:
    """The body of one request. `is_complete`: its last byte has arrived. `was_streamed`: a part of
    it was sent to a worker.

    Methods that read raise HttpError 400 for invalid chunks, 413 past the limit, 503 if too many
    bytes are held; PhaseTimeout if the client stops sending, ClientDisconnected if it disconnects.
    """

    __slots__ = (
        "_exchange", "_held", "_io", "_left", "_out", "_read_bytes", "_reader", "held_bytes",
        "is_complete", "was_streamed",
    )  # fmt: skip

    def __init__(self, io: ExchangeIO, exchange: Exchange, head: RequestHead, limit: int) -> None:
        self.is_complete = self.was_streamed = False
        self.held_bytes = 0
        self._io = io
        self._exchange = exchange
        self._held: list[bytes | bytearray] = []
        self._left = head.length  # bytes yet to arrive of a body with a content-length
        self._reader = ChunkedBody(limit) if head.length == CHUNKED else None
        self._read_bytes = CHUNKED_READ_BYTES if self._reader is not None else READ_BYTES
        self._out = memoryview(b"")  # bytes read that the worker has not accepted yet
        received, io.unread = io.unread, b""
        self._hold(self._payload_in(received))

    @property
    def beginning(self) -> bytes:
        """The bytes held so far."""
        return b"".join(self._held)

    async def hold(self, max_bytes: int) -> bool:
        """Read until the body is whole or more than `max_bytes` are held. Returns whether it is
        whole."""
        while not self.is_complete and self.held_bytes <= max_bytes:
            self._hold(self._payload_in(await self._read()))
        return self.is_complete

    async def hold_all(self) -> None:
        """Read the whole body. Raises HttpError 503 immediately if its content-length can't be
        held."""
        if self._left > 0:
            self._io.services.inflight.check_room(self._left)
        while not self.is_complete:
            self._hold(self._payload_in(await self._read()))

    def take(self) -> bytes:
        """Return the held bytes, and drop them here."""
        chunks, self._held = self._held, []
        if len(chunks) != 1:
            return b"".join(chunks)
        if self.held_bytes > LARGE_BYTES:  # not converted: the bytearray is used like bytes
            return cast("bytes", chunks[0])
        return bytes(chunks[0])

    def buffered_body(self) -> bytes:
        """Return the held bytes, and keep them here."""
        whole = self.take()
        self._held = [whole]
        return whole

    def start_stream(self, lines: bytes) -> bytes:
        """Begin streaming the held bytes. Returns the head with the framing that is sent."""
        body = self.take()
        self._io.services.inflight.release_bytes(self._exchange)
        self.was_streamed = True
        if self._reader is None:
            self._out = memoryview(body)
            return b"%bcontent-length: %d\r\n\r\n" % (lines, len(body) + self._left)
        self._out = memoryview(self._chunked(body))
        return b"%btransfer-encoding: chunked\r\n\r\n" % lines

    async def stream_to(self, upstream: Stream) -> bool:
        """Send the rest to the worker. False if it responds before the end, or the connection
        breaks."""
        while await self._flush(upstream):
            if self.is_complete:
                return True
            chunk = await self._read_unless_response(upstream)
            if chunk is None:
                break
            payload = self._payload_in(chunk)
            self._out = memoryview(payload if self._reader is None else self._chunked(payload))
        return False

    def _chunked(self, payload: bytes) -> bytes:
        framed = encode_chunk(payload) if payload else b""
        return framed + LAST_CHUNK if self.is_complete else framed

    def _payload_in(self, received: bytes) -> bytes:
        """The payload in `received`; bytes after the body's end are left for the next request."""
        reader, io = self._reader, self._io
        if reader is None:
            payload = received[: self._left]
            self._left -= len(payload)
            self.is_complete = not self._left
            io.unread = received[len(payload) :]
        else:
            reader.feed(received)
            chunks = len(reader.payload)
            io.reads_since_pause += chunks // CHUNKS_PER_READ
            payload = b"".join(reader.payload)
            large = len(payload) >= max(chunks, 1) * LARGE_CHUNK_BYTES
            self._read_bytes = LARGE_CHUNKS_READ_BYTES if large else CHUNKED_READ_BYTES
            reader.payload.clear()
            self.is_complete = reader.is_complete
            if self.is_complete:
                io.unread = reader.rest
        self._exchange.bytes_in += len(payload)
        if self.is_complete:
            self._exchange.body_at = io.loop.now
        return payload

    def _hold(self, payload: bytes) -> None:
        if payload:
            self._io.services.inflight.hold(self._exchange, len(payload))
            self.held_bytes += len(payload)
            self._keep(payload)

    def _keep(self, payload: bytes) -> None:
        """Store the payload. Small chunks are joined, because separate objects need far more
        memory."""
        chunks = self._held
        if self.held_bytes > LARGE_BYTES:  # grow in place, because joining at the end blocks long
            if len(chunks) != 1 or not isinstance(chunks[0], bytearray):
                chunks[:] = [bytearray().join(chunks)]
            chunks[0] += payload
        elif len(payload) >= SMALL_CHUNK_BYTES:
            chunks.append(payload)
        elif chunks and isinstance(chunks[-1], bytearray):
            chunks[-1] += payload
        else:
            chunks.append(bytearray(payload))

    async def _read(self) -> bytes:
        io = self._io
        io.set_timeout("body", io.settings.timeouts.client_body)
        try:
            chunk = await io.read(io.client, self._read_bytes)
        except OSError:
            raise ClientDisconnected from None
        if not chunk:
            raise ClientDisconnected
        return chunk

    async def _read_unless_response(self, upstream: Stream) -> bytes | None:
        """As `_read`; None if the worker responds first."""
        io, client = self._io, self._io.client
        io.set_timeout("body", io.settings.timeouts.client_body)
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
        """Send all bytes that were read to the worker. False as in `stream_to`."""
        io = self._io
        if self._out:
            io.set_timeout("send", io.settings.timeouts.response_head)
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
