"""The websocket route: a speech session between a client and one worker.

The client is accepted first, since only its first message tells where the session may go. From then
on every refusal is an error event and a closing frame. WebSocketFrames pass both ways, each side read only
while the other takes what it has. A client's messages go on whole, so that none beyond its limit
reaches a worker in part; a worker's go on in the pieces they come in. Source: omni-router.md 12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from wsproto.connection import ConnectionType
from wsproto.events import CloseConnection, Message

from omni_proxy.dataplane.exchange.exchange import Exchange, new_id, report, stamp
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ANY_STREAM, ClientDisconnected, PhaseTimeout, pause
from omni_proxy.dataplane.upstream.pool import PIECE_BYTES
from omni_proxy.dataplane.websocket.connect import reach_worker
from omni_proxy.routing.inspect.requirements import RequestFacts, inspect_session
from omni_proxy.routing.voices import pin_to_voice_owner
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead
from omni_proxy.wire.speech_events import SpeechEvents, is_application_code
from omni_proxy.wire.websocket import WebSocketFrames, accept_handshake, close_code, error_event

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection

CONFIG_SECS: Final = 10.0
CONFIG_BYTES: Final = 15_029_592
CONFIG_PIECE_BYTES: Final = 32768  # of the smallest frames 50 ms of work
BYTES_PER_READ: Final = 1024  # frames may be so small that these take longer than a read
MESSAGE_BYTES: Final = 131072
CLOSE_SECS: Final = 2.0  # for the other ends to answer our closing frame


class _Over(Exception):
    """The session ends: the closing code and reason for both sides, and an error to tell first."""

    def __init__(self, code: int, reason: str, error: HttpError | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.error = error


async def session(conn: Connection, mine: Exchange, head: RequestHead) -> bool:
    """The whole session; False, as its connection carries nothing after it.

    Raises HttpError for what is no handshake, ClientDisconnected when the client leaves without a closing frame.
    """
    mine.request_id = head.request_id or new_id()
    if conn.door.stamps is not None:
        stamp(conn.door.stamps, mine, head)
    told = b"X-SGLang-Omni-Request-ID: %b\r\n" % mine.request_id
    top = accept_handshake(head, told + mine.request_id_line)
    mine.status, mine.stream, mine.relayed = 101, True, True
    here = _Session(conn, mine)
    here.down.out += top
    try:
        try:
            await here.run(head)
        except HttpError as refusal:
            mine.end("refused", "proxy", str(refusal.code))
            raise _Over(close_code(refusal.status), refusal.message, refusal) from None
    except _Over as over:
        await here.part(over)
    return False


class _Session:
    """Both ends of one session, and what has been heard so far."""

    def __init__(self, conn: Connection, mine: Exchange) -> None:
        self.conn = conn
        self.mine = mine
        self.down = WebSocketFrames(ConnectionType.SERVER)
        self.up = WebSocketFrames(ConnectionType.CLIENT)
        self.heard = SpeechEvents()

    async def run(self, head: RequestHead) -> None:
        """From the client's first message to an end. Raises _Over, HttpError, ClientDisconnected."""
        conn, mine = self.conn, self.mine
        await conn.door.queue.for_slot(conn, mine, unread=False)
        first = await self._first_message()
        mine.body_at = conn.loop.now
        route = mine.route
        assert route is not None
        need = mine.need = inspect_session(route, first, RequestFacts(b"", head.hints))
        pin_to_voice_owner(conn.door.voices, route.traffic, need)
        conn.hold(len(first))
        worker, piece = await reach_worker(conn, mine, head)
        conn.let_go()
        need.body_fields = None
        self.up.send(first)
        self.up.feed(piece)
        try:
            await self._relay(conn.client, worker)
        except PhaseTimeout:
            self._stalled()

    async def _first_message(self) -> str | bytes:
        conn = self.conn
        limit = min(conn.door.limits.max_body, CONFIG_BYTES)
        conn.clock("config", CONFIG_SECS)
        piece, conn.rest = conn.rest, b""
        try:
            while True:
                self.down.feed(piece)
                message = self._hear_client(limit)
                self._flush_client()
                if message is not None:
                    return message
                piece = await conn.more(conn.client, CONFIG_PIECE_BYTES)
                if not piece:
                    raise ClientDisconnected
                self.mine.bytes_in += len(piece)
                conn.reads_since_pause += len(piece) // BYTES_PER_READ
        except PhaseTimeout:
            message = "session.config was not received before timeout"
            raise HttpError(400, message, 400) from None
        except OSError:
            raise ClientDisconnected from None

    async def _relay(self, client: Stream, worker: Stream) -> None:
        """WebSocketFrames both ways until somebody ends it. Raises _Over, HttpError, ClientDisconnected, PhaseTimeout."""
        conn, down, up = self.conn, self.down, self.up
        idle = conn.door.limits.idle
        self._pass_on()
        self._hear_worker()
        conn.clock("relay", idle)
        while True:
            moved = self._flush_client() | self._flush_worker(worker)
            if not down.out:
                moved |= self._read_worker(worker)
            if not up.out:
                moved |= self._read_client(client)
            elif client.peer_closed:
                raise ClientDisconnected  # what it sent last is not worth waiting for a worker that takes nothing
            if moved:
                conn.clock("relay", idle)
                if conn.count_read():
                    await pause
            else:
                conn.waiting_on = ANY_STREAM
                await pause

    def _flush_client(self) -> bool:
        try:
            sent = self.conn.client.send_from(self.down.out)
        except OSError:
            raise ClientDisconnected from None
        self.mine.bytes_out += sent
        return sent > 0

    def _flush_worker(self, worker: Stream) -> bool:
        try:
            return worker.send_from(self.up.out) > 0
        except OSError:
            self.up.out.clear()  # what it said before it broke is still to be read
            return True

    def _read(self, sock: Stream) -> bytes | None:
        """What is there: None for nothing yet, b"" at the end. Raises OSError."""
        piece = sock.read(PIECE_BYTES) if sock.readable else None
        if piece:
            self.conn.reads_since_pause += len(piece) // BYTES_PER_READ
        return piece

    def _read_client(self, client: Stream) -> bool:
        try:
            piece = self._read(client)
        except OSError:
            raise ClientDisconnected from None
        if piece is None:
            return False
        if not piece:
            raise ClientDisconnected
        self.mine.bytes_in += len(piece)
        self.down.feed(piece)
        self._pass_on()
        return True

    def _pass_on(self) -> None:
        limit = min(self.conn.door.limits.max_body, MESSAGE_BYTES)
        while (message := self._hear_client(limit)) is not None:
            self.up.send(message)

    def _hear_client(self, limit: int) -> str | bytes | None:
        """Its next whole message, None where more bytes must come. Raises _Over, HttpError 413."""
        for event in self.down.events():
            if isinstance(event, CloseConnection):
                ended = "refused" if self.down.broken else "stream_cancelled"
                self.mine.end(ended, "client", _said(event))
                raise _Over(event.code, event.reason or "")
            if isinstance(event, Message):
                message = self.down.join(event, limit)
                if message is not None:
                    return message
        return None

    def _read_worker(self, worker: Stream) -> bool:
        try:
            piece = self._read(worker)
        except OSError as error:
            raise self._worker_left(None, f"ReadError: {error.strerror or error}") from None
        if piece is None:
            return False
        if not piece:
            raise self._worker_left(None, "RemoteProtocolError: no closing frame")
        self.up.feed(piece)
        self._hear_worker()
        return True

    def _hear_worker(self) -> None:
        mine, heard = self.mine, self.heard
        for event in self.up.events():
            if isinstance(event, CloseConnection):
                raise self._worker_left(event, _said(event))
            if not isinstance(event, Message) or not (event.data or event.message_finished):
                continue
            self.down.send(event.data, finished=event.message_finished)
            mine.first_at = mine.first_at or self.conn.loop.now
            mine.pieces += 1
            if isinstance(event.data, str):
                heard.feed(event.data, finished=event.message_finished)
                if heard.done and heard.failed_audio:
                    mine.end("stream_error", "worker", "audio.done with error")
                elif heard.done:
                    mine.end("completed", "")

    def _worker_left(self, close: CloseConnection | None, why: str) -> _Over:
        """What its leaving means: an end, an error of the application, or a failure of its own."""
        mine, heard = self.mine, self.heard
        message = "upstream WebSocket closed before session.done"
        code, reason = (1000, "") if heard.done else (1011, message)
        if close is not None and not self.up.broken:
            code, reason = close.code, close.reason or ""
        mine.end("stream_error", "worker", why)
        if heard.done or heard.error or (close is not None and is_application_code(code)):
            return _Over(code, reason)
        self._blame(why)
        error = HttpError(502, message, 502, type="upstream_error")
        return _Over(1011 if self.down.in_message else code, reason, error)

    def _blame(self, error: str) -> None:
        worker = self.mine.worker
        assert worker is not None
        report(self.conn, self.mine, worker, error)

    def _stalled(self) -> None:
        """Nothing has moved for idle_secs. Raises HttpError where the client can still be told."""
        if self.down.out:
            self.mine.end("client_stalled", "client", "the client stopped reading")
            self.conn.client.close(reset=True)
        elif self.up.out:
            self._blame("WriteTimeout: the worker stopped reading")
            self.mine.end("upstream_error", "worker", "WriteTimeout")
            raise HttpError(504, "upstream WebSocket failed", 504, type="upstream_error")
        else:
            raise HttpError(408, "the session was silent for too long", 408)

    async def part(self, over: _Over) -> None:
        """Tell both ends and hear them out: closing on unread bytes would reset our words away."""
        conn, down, worker = self.conn, self.down, self.conn.upstream
        if over.error is not None and not down.in_message:
            down.send(error_event(over.error))
        down.close(over.code, over.reason)
        self.up.close(over.code, over.reason)
        if worker is not None:
            self._flush_worker(worker)
        try:
            conn.clock("client", conn.door.limits.idle)
            await conn.write(conn.client, bytes(down.out))
            conn.clock("linger", CLOSE_SECS)
            if worker is not None:
                if not self.up.broken:
                    await self._until_left(worker, self.up)
                worker.close()
            await self._until_left(conn.client, down)
        except PhaseTimeout:
            conn.client.close(reset=conn.phase == "client")
        except OSError:
            raise ClientDisconnected from None

    async def _until_left(self, sock: Stream, frames: WebSocketFrames) -> None:
        while frames.broken or not frames.left:
            try:
                piece = await self.conn.more(sock)
            except OSError:
                return
            if not piece:
                return
            frames.feed(piece)
            for _ in frames.events():
                pass


def _said(close: CloseConnection) -> str:
    return f"closed with code {int(close.code)} {close.reason or ''}".rstrip()
