"""One client connection: `serve` reads a request, has it answered, and goes on to the next.

Contract: this file owns the client's socket. It alone decides whether the connection is kept, and
every refusal (`wire.errors.Refusal`) raised anywhere in an exchange becomes bytes in `_refuse`.
What must be done for a request is `exchange.answer`; nothing here knows workers.
"""

from __future__ import annotations

import socket
from math import inf
from typing import TYPE_CHECKING, Final

from omni_proxy.control.routes import TOPPED
from omni_proxy.door import exchange as exchanges
from omni_proxy.door.account import Exchange, diagnostics, new_id, settle
from omni_proxy.door.conn import CUT, LEFT, Conn
from omni_proxy.door.introduction import introduce
from omni_proxy.door.task import Expired, Gone, Task, pause
from omni_proxy.door.upstream import PIECE_BYTES
from omni_proxy.wire.errors import Refusal, answer
from omni_proxy.wire.head import RequestHead, find_end, past_empty_lines

if TYPE_CHECKING:
    from omni_proxy.door.comments import Comments
    from omni_proxy.door.core import Door
    from omni_proxy.door.upload import Upload

LINGER_PIECE_BYTES: Final = 262144
LINGER_SECS: Final = 2.0
LINGER_BYTES: Final = 16 * 1024 * 1024


class Connection(Task):
    """The coroutine of one client connection and the reads and writes it is made of."""

    __slots__ = (
        "comments", "deadline", "door", "exchange", "held_bytes", "introduced", "peer", "rest",
        "turn_at", "upload", "upstream",
    )  # fmt: skip

    client: Conn
    front_only = False  # whatever comes goes to the control routes

    def __init__(self, door: Door, sock: socket.socket, peer: str) -> None:
        super().__init__(door.pump)
        self.door = door
        self.peer = peer
        self.client = Conn(door.pump, sock, self)
        self.exchange: Exchange | None = None
        self.upstream: Conn | None = None  # closed with us unless its lane has taken it back
        self.deadline = inf  # of the whole exchange, whatever phase it is in
        self.turn_at = self.pump.now  # when the present request's first byte came
        self.rest = b""  # read from the client, not yet consumed
        self.upload: Upload | None = None  # a body that streams to its worker
        self.comments: Comments | None = None  # where a stream is awaited, and they are asked for
        self.held_bytes = 0  # of the bodies that all connections hold, ours
        self.introduced = self.front_only or not door.config.server.proxy_protocol

    def counts_as_gone(self, mask: int) -> bool:
        return bool(mask & (LEFT if self.door.half_close_aborts else CUT))

    def clock(self, phase: str, secs: float) -> None:
        """Enter a phase that may last `secs`."""
        self.phase = phase
        due = self.pump.now + secs
        # min() would cost as much as all the rest of this.
        self.due = due if due < self.deadline else self.deadline  # noqa: FURB136

    async def serve(self) -> None:
        """One exchange after the other. In one frame on purpose: each more costs every event."""
        try:
            if not self.introduced:
                await introduce(self)
            keep = True
            while keep:
                self.deadline = inf
                try:
                    raw = await self._read_head()
                except (Refusal, Expired) as error:
                    await self._refuse_head(error)
                    return
                if raw is None:
                    return
                mine = self.exchange = Exchange(self.turn_at, self.peer)
                try:
                    known = self.door.requests[self.client.secure]
                    head, raw = known.judge(raw), None  # not kept for as long as the answer lasts
                    keep = await exchanges.answer(self, mine, head)
                except (Refusal, Expired) as error:
                    keep = await self._refuse(mine, error)
                except Gone:
                    ended = "stream_cancelled" if mine.relayed else "client_disconnected"
                    mine.end(ended, "client")
                    raise
                finally:
                    settle(self.door, mine, self.phase)
                    self.exchange = None
        except (Gone, OSError):
            pass  # whoever would be told is not there any more
        finally:
            if self.held_bytes:
                self.let_go()
            if self.upstream is not None:
                self.upstream.close()
            self.client.close()

    async def _read_head(self) -> bytes | None:
        """The next head, whole; None where the client is done. Raises Refusal, Expired."""
        limits, client = self.door.limits, self.client
        self.clock("idle", limits.client_idle)
        buffer = past_empty_lines(self.rest)
        self.turn_at = self.pump.now
        searched = 0
        while True:
            if self.door.draining and not (buffer or client.late):
                return None
            if buffer and buffer != b"\r":  # which may be half of an empty line
                end = find_end(buffer, searched)
                if end:
                    self.rest = buffer[end:]
                    return buffer[:end]
                if not searched:
                    self.clock("head", limits.client_head)
                searched = len(buffer)
            if self.waits_for(client):
                await pause
            piece = client.read(PIECE_BYTES)
            if piece is None:
                continue
            if not piece:
                await self.flush(client)
                return None
            if not buffer:
                self.turn_at = self.pump.now
            buffer = past_empty_lines(buffer + piece if buffer else piece)

    def body_at_hand(self, mine: Exchange, head: RequestHead, limit: int) -> bytes | None:
        """The body where it came along with its head, as most do. Raises Refusal 413."""
        length = head.length
        if length > limit:
            raise Refusal(413, "payload too large", "payload_too_large", close=True)
        if not 0 <= length <= len(self.rest):
            return None
        body, self.rest = self.rest[:length], self.rest[length:]
        mine.bytes_in = length
        mine.body_at = self.pump.now
        return body

    def let_go(self) -> None:
        """The bodies that were held for the present exchange are needed no more."""
        self.door.held_bytes -= self.held_bytes
        self.held_bytes = 0

    async def more(self, conn: Conn, size: int = PIECE_BYTES) -> bytes:
        """What comes next; b"" at the peer's end. Raises OSError for a broken connection."""
        while True:
            if self.waits_for(conn):
                await pause
            piece = conn.read(size)
            if piece is not None:
                return piece

    async def write(self, conn: Conn, piece: bytes) -> None:
        """All of it; a peer that does not read makes us wait, under the present clock."""
        if conn.late:
            await self.flush(conn)
        try:
            sent = conn.send(piece)
        except BlockingIOError:
            sent = 0
        if sent < len(piece):
            await self.write_rest(conn, piece, sent)

    async def flush(self, conn: Conn) -> None:
        """What `put` has taken and has not left yet, under the present clock."""
        while conn.late:
            conn.send_late()
            if conn.late:
                self.awaits = conn
                await pause

    async def write_rest(self, conn: Conn, piece: bytes, sent: int) -> None:
        view = memoryview(piece)[sent:]
        while view:
            self.awaits = conn
            await pause
            try:
                view = view[conn.send(view) :]
            except BlockingIOError:
                continue

    async def _refuse_head(self, error: Refusal | Expired) -> None:
        """A head that can't be read is still an exchange in the logs; no head at all is none."""
        if isinstance(error, Expired) and self.phase == "idle":
            return
        mine = Exchange(self.turn_at, self.peer)
        try:
            await self._refuse(mine, error)
        finally:
            settle(self.door, mine, self.phase)

    async def _refuse(self, mine: Exchange, error: Refusal | Expired) -> bool:
        """Answer it ourselves; the connection goes on where the request was read to its end."""
        refusal = error if isinstance(error, Refusal) else _late(str(error))
        if mine.route is None and mine.target.partition("?")[0] in TOPPED:
            refusal.topped()
        worker_lines = (diagnostics(mine) if mine.attempts else b"") + self._id_line(mine)
        mine.status = refusal.status
        outcome = "upstream_error" if mine.attempts and refusal.status >= 500 else "refused"
        comments, self.comments = self.comments, None
        if comments is not None and comments.begun:
            comments.refuse(refusal)
            return False
        mine.end(outcome, _whose(refusal), str(refusal.code), phase=self.phase)
        if mine.relayed:
            return False
        if self.held_bytes:
            error.__traceback__ = error.__context__ = None  # their frames keep the body
            self.let_go()
        unread = self.upload is not None and not self.upload.whole
        keep = not refusal.close and not unread and not self.door.draining
        self.upload = None
        body = refusal.body()
        reply = answer(refusal.status, body, refusal.headers, close=not keep)
        if worker_lines:
            reply = reply.replace(b"\r\n\r\n", b"\r\n" + worker_lines + b"\r\n", 1)
        if mine.method == "HEAD":
            reply = reply[: len(reply) - len(body)]
        self.deadline = inf
        self.clock("refuse", self.door.limits.idle)
        await self.write(self.client, reply)
        mine.bytes_out += len(body)
        if not keep:
            await self.linger()
        elif self.turn_is_over():  # the next may have come along, and be refused as quickly
            await pause
        return keep

    def _id_line(self, mine: Exchange) -> bytes:
        """Of a request that may have been refused before it got an id."""
        stamps = self.door.stamps
        if stamps is None or not stamps.id_name:
            return b""
        mine.request_id = mine.request_id or new_id()
        return stamps.id_line(mine.request_id)

    async def linger(self) -> None:
        """Read on for a moment: closing on unread bytes would reset the answer away."""
        self.client.end_sending()
        self.clock("linger", LINGER_SECS)
        left = LINGER_BYTES
        try:
            while left > 0:
                piece = await self.more(self.client, LINGER_PIECE_BYTES)
                if not piece:
                    break
                left -= len(piece)
        except Expired:
            pass


def _late(phase: str) -> Refusal:
    if phase in ("head", "body"):
        message = f"the request's {phase} stopped coming before its end"
        return Refusal(408, message, f"{phase}_timeout", close=True)
    return Refusal(504, f"time ran out in phase {phase}", "timeout", close=True)


def _whose(refusal: Refusal) -> str:
    """Who ended an exchange that we answer ourselves."""
    if refusal.status in (502, 504):
        return "worker"
    return "client" if refusal.status == 408 else "proxy"
