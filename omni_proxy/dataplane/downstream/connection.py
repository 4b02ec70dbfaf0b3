"""One client connection: `serve` reads a request, has it answered, and goes on to the next.

Contract: this file owns the client's socket. It alone decides whether the connection is kept, and
every refusal (`wire.errors.Refusal`) raised anywhere in an exchange becomes bytes in `refusing`.
What must be done for a request is `exchange.answer`; what is like the last one goes `short`, while
the coroutine rests. Nothing here knows workers.
"""

from __future__ import annotations

import socket
from collections.abc import Coroutine
from math import inf
from typing import TYPE_CHECKING, Any

from omni_proxy.dataplane.accept.proxy_protocol import read_proxy_header
from omni_proxy.dataplane.exchange import pipeline as exchanges
from omni_proxy.dataplane.exchange.exchange import Exchange, settle
from omni_proxy.dataplane.exchange.fast_path import FastPath
from omni_proxy.dataplane.exchange.local_reply import refuse, refuse_head
from omni_proxy.dataplane.loop.stream import HUNG_UP, PEER_CLOSED, Stream
from omni_proxy.dataplane.loop.task import ClientDisconnected, ConnectionTask, PhaseTimeout, pause
from omni_proxy.dataplane.upstream.attempt import FastPathHandoff
from omni_proxy.dataplane.upstream.pool import PIECE_BYTES
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead, find_head_end, skip_empty_lines

if TYPE_CHECKING:
    from omni_proxy.dataplane.dataplane import DataPlane
    from omni_proxy.dataplane.exchange.request_body import RequestBody
    from omni_proxy.dataplane.exchange.sse_keepalive import SseKeepAlive


class Connection(ConnectionTask):
    """The coroutine of one client connection and the reads and writes it is made of."""

    __slots__ = (
        "begun",
        "closing",
        "comments",
        "deadline",
        "door",
        "exchange",
        "head_bytes",
        "held_bytes",
        "peer",
        "proxy_header_read",
        "rest",
        "short",
        "turn_at",
        "upload",
        "upstream",
    )  # fmt: skip

    client: Stream
    admin_only = False  # whatever comes goes to the control routes

    def __init__(self, door: DataPlane, sock: socket.socket, peer: str) -> None:
        super().__init__(door.loop)
        self.door = door
        self.peer = peer
        self.client = Stream(door.loop, sock, self)
        self.exchange: Exchange | None = None
        self.upstream: Stream | None = None  # closed with us unless its lane has taken it back
        self.deadline = inf  # of the whole exchange, whatever phase it is in
        self.closing = False  # its next answer says so, and is its last
        self.turn_at = self.loop.now  # when the present request's first byte came
        self.rest = b""  # read from the client, not yet consumed
        self.upload: RequestBody | None = None  # a body that streams to its worker
        self.comments: SseKeepAlive | None = (
            None  # where a stream is awaited, and they are asked for
        )
        self.short: FastPath | None = None  # from the first request on that it could do
        self.begun: FastPathHandoff | None = None  # what it hands over
        self.head_bytes = 0  # of the present request
        self.held_bytes = 0  # of the requests that all connections hold, ours
        self.proxy_header_read = self.admin_only or not door.config.server.proxy_protocol

    def is_disconnect(self, mask: int) -> bool:
        return bool(mask & (PEER_CLOSED if self.door.half_close_aborts else HUNG_UP))

    def throw(self, error: BaseException) -> None:
        if self.short is not None:
            self.short.hand_over()
        super().throw(error)

    def on_phase_timeout(self) -> None:
        if self.short is not None:
            self.short.hand_over()
        super().on_phase_timeout()

    def close_coroutine(self) -> None:
        if self.short is not None:
            self.short.hand_over()
        super().close_coroutine()

    def present(self) -> Exchange | None:
        """What it is doing."""
        return self.exchange or (self.short.asked if self.short is not None else None)

    def clock(self, phase: str, secs: float) -> None:
        """Enter a phase that may last `secs`."""
        self.phase = phase
        due = self.loop.now + secs
        # min() would cost as much as all the rest of this.
        self.phase_deadline = due if due < self.deadline else self.deadline  # noqa: FURB136

    async def serve(self) -> None:
        """One exchange after the other. In one frame on purpose: each more costs every event."""
        try:
            if not self.proxy_header_read:
                await read_proxy_header(self)
            keep = True
            while keep:
                self.deadline = inf
                try:
                    raw = await self._read_head()
                except (HttpError, PhaseTimeout) as error:
                    await refuse_head(self, error)
                    return
                if raw is None:
                    return
                mine = self.exchange = self._exchange(raw)
                try:
                    going, raw = self._answer(mine, raw), None  # kept no longer than it is needed
                    keep = await going
                except (HttpError, PhaseTimeout) as error:
                    keep = await refuse(self, mine, error)
                except ClientDisconnected:
                    ended = "stream_cancelled" if mine.relayed else "client_disconnected"
                    mine.end(ended, "client")
                    raise
                finally:
                    settle(self.door, mine, self.phase)
                    self.exchange = None
        except (ClientDisconnected, OSError):
            pass  # whoever would be told is not there any more
        finally:
            if self.held_bytes:
                self.let_go()
            if self.upstream is not None:
                self.upstream.close()
            self.client.close()

    def _exchange(self, asked: bytes | FastPathHandoff) -> Exchange:
        return (
            asked.mine if isinstance(asked, FastPathHandoff) else Exchange(self.turn_at, self.peer)
        )

    def _answer(self, mine: Exchange, asked: bytes | FastPathHandoff) -> Coroutine[Any, Any, bool]:
        """What will answer it, as `exchanges.answer` has it. Raises HttpError."""
        if isinstance(asked, FastPathHandoff):
            return exchanges.go_on(self, asked)
        return exchanges.answer(self, mine, self._judged(asked))

    def _judged(self, raw: bytes) -> RequestHead:
        """Raises HttpError. From here on what is spelled like it may go the short way."""
        self.head_bytes = len(raw)
        head = self.door.requests[self.client.is_tls].parse(raw)
        usuals = None if self.admin_only else self.door.usuals
        usual = usuals.of(head) if usuals is not None else None
        if usual is not None and (self.short is None or self.short.usual is not usual):
            self.short = FastPath(self, usual)
        return head

    async def _read_head(self) -> bytes | FastPathHandoff | None:
        """The next head, whole, or what the short way has begun; None where the client is done.

        Raises HttpError, PhaseTimeout.
        """
        limits, client = self.door.limits, self.client
        self.clock("idle", limits.client_idle)
        buffer, self.rest = skip_empty_lines(self.rest), b""
        self.turn_at = self.loop.now
        searched = 0
        while buffer or client.pending or not self.door.draining:
            if buffer and buffer != b"\r":  # which may be half of an empty line
                end = find_head_end(buffer, searched)
                if end:
                    self.rest = buffer[end:]
                    return buffer[:end]
                if not searched:
                    self.clock("head", limits.client_head)
                searched = len(buffer)
            if self.must_wait_for(client):
                self._rest(buffer)
                await pause
            begun, self.begun = self.begun, None
            if begun is not None:
                return begun
            piece, self.rest = self.rest or client.read(PIECE_BYTES), b""
            if piece is None:
                continue
            if not piece:
                await self.flush(client)
                break
            if not buffer:
                self.turn_at = self.loop.now
            buffer = skip_empty_lines(buffer + piece if buffer else piece)
        return None

    def _rest(self, buffer: bytes) -> None:
        """Until the client says something: what is spelled as usual goes the short way then."""
        if self.short is not None and not buffer and not self.client.readable:
            self.short.stand_in()

    def body_at_hand(self, mine: Exchange, head: RequestHead, limit: int) -> bytes | None:
        """The body where it came along with its head, as most do. Raises HttpError 413."""
        length = head.length
        if length > limit:
            raise HttpError(413, "payload too large", "payload_too_large", close=True)
        if not 0 <= length <= len(self.rest):
            return None
        body, self.rest = self.rest[:length], self.rest[length:]
        mine.bytes_in = length
        mine.body_at = self.loop.now
        return body

    def hold(self, size: int) -> None:
        """So many bytes of the present request stay in memory. Raises HttpError 503."""
        door = self.door
        door.check_room(size)
        door.held_bytes += size
        self.held_bytes += size

    def let_go(self) -> None:
        """The bodies that were held for the present exchange are needed no more."""
        self.door.held_bytes -= self.held_bytes
        self.held_bytes = 0

    async def more(self, conn: Stream, size: int = PIECE_BYTES) -> bytes:
        """What comes next; b"" at the peer's end. Raises OSError for a broken connection."""
        while True:
            if self.must_wait_for(conn):
                await pause
            piece = conn.read(size)
            if piece is not None:
                return piece

    async def write(self, conn: Stream, piece: bytes) -> None:
        """All of it; a peer that does not read makes us wait, under the present clock."""
        if conn.pending:
            await self.flush(conn)
        try:
            sent = conn.send(piece)
        except BlockingIOError:
            sent = 0
        if sent < len(piece):
            await self.write_rest(conn, piece, sent)

    async def flush(self, conn: Stream) -> None:
        """What `put` has taken and has not left yet, under the present clock."""
        while conn.pending:
            conn.flush()
            if conn.pending:
                self.waiting_on = conn
                await pause

    async def write_rest(self, conn: Stream, piece: bytes, sent: int) -> None:
        view = memoryview(piece)[sent:]
        while view:
            self.waiting_on = conn
            await pause
            try:
                view = view[conn.send(view) :]
            except BlockingIOError:
                continue
