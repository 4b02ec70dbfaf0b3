"""SseKeepAlive of event streams that have not begun, so that nobody on the way takes them for dead.

`[server] sse_keepalive_secs` asks for them. A worker that has sent its head gets comments behind
it; for one that has not, we begin the answer ourselves: 200, an event stream. Contract: no byte of
a worker has gone out until then, so tries go on as before; what would have been another status is
told as an error event, and the answer is cut. Costs nothing where it was not asked for.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout, pause
from omni_proxy.dataplane.upstream.attempt import ResponseStart
from omni_proxy.wire.chunked import encode_chunk
from omni_proxy.wire.errors import HttpError, error_body
from omni_proxy.wire.forwarded import field_value
from omni_proxy.wire.request import RequestHead, drop_fields
from omni_proxy.wire.response import Framing, Unchunker, UpstreamProtocolError, UpstreamResponse

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection

COMMENT: Final = b": keep-alive\n\n"
TOLD_BYTES: Final = 16384  # of an answer that becomes an error event


class SseKeepAlive:
    """Of one exchange. `begun`: the answer's head was ours."""

    __slots__ = ("_chunked", "_conn", "_mine", "_secs", "begun", "may_begin")

    def __init__(self, conn: Connection, mine: Exchange, head: RequestHead) -> None:
        self._conn = conn
        self._mine = mine
        self._secs = conn.door.limits.sse_keepalive
        self._chunked = not head.http_1_0
        self.begun = False
        # Speech that streams may be plain audio.
        self.may_begin = mine.route is not None and not mine.route.traffic.startswith("speech")
        head.lines = drop_fields(head.lines, frozenset((b"accept-encoding",)))  # ours is plain

    async def for_head(self, up: Stream) -> None:
        """As `pause` until `up` has news."""
        if self.may_begin:
            await self._pause(up)
        else:
            await pause

    async def for_first(self, up: Stream, answer: UpstreamResponse) -> None:
        """Until `up` may have a first piece of a body that is an event stream."""
        plain = (
            not self._mine.first_at
            and answer.sse
            and not field_value(answer.lines, b"content-encoding")
        )
        if plain and (self.begun or answer.framing is not Framing.LENGTH):
            while not up.readable:
                self._conn.waiting_on = up
                await self._pause(up)

    async def _pause(self, up: Stream) -> None:
        """Raises PhaseTimeout when the time of the phase is over."""
        conn = self._conn
        due = conn.phase_deadline
        try:
            while True:
                conn.phase_deadline = min(due, conn.loop.now + self._secs)
                try:
                    await pause
                except PhaseTimeout:
                    if conn.loop.now > due:
                        raise
                    await self._say()
                    if not up.readable:
                        conn.waiting_on = up
                        continue
                return
        finally:
            conn.phase_deadline = due

    async def _say(self) -> None:
        piece = self._framed(COMMENT)
        if not self.begun and not self._mine.relayed:
            self.begun = True
            piece = self._head() + piece
        conn = self._conn
        conn.phase_deadline = conn.loop.now + conn.door.limits.idle
        try:
            await conn.write(conn.client, piece)
        except PhaseTimeout:
            self._mine.end("client_stalled", "client", "the client stopped reading", phase="client")
            conn.client.close(reset=True)
            raise ClientDisconnected from None
        except OSError:
            raise ClientDisconnected from None

    def _framed(self, piece: bytes) -> bytes:
        return encode_chunk(piece) if self._chunked else piece

    def _head(self) -> bytes:
        told = b"X-SGLang-Omni-Request-ID: %b\r\n" % self._mine.request_id
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b"connection: close\r\n"
        return (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
            b"%b%b%b%b\r\n" % (told, self._mine.request_id_line, self._mine.cors, framing)
        )

    def goes_on_with(self, first: ResponseStart) -> bool:
        """Whether its body can follow on what we have begun."""
        answer = first.answer
        plain = answer.status == 200 and answer.sse and not first.bodiless
        return plain and not field_value(answer.lines, b"content-encoding")

    async def tell_instead(self, first: ResponseStart) -> bool:
        """A worker's answer that is no stream, as an error event; False, as we cut it then."""
        conn, mine, answer = self._conn, self._mine, first.answer
        mine.relayed = True
        body = await self._body_of(first)
        mine.end("stream_error", "worker", f"status={answer.status} after the stream was begun")
        self.cut_with(_as_error(answer.status, body))
        first.up.close()
        conn.upstream = None
        return False

    async def _body_of(self, first: ResponseStart) -> bytes:
        conn, answer = self._conn, first.answer
        payload = Unchunker().feed if answer.framing is Framing.CHUNKED else bytes
        conn.clock("relay", conn.door.limits.idle)
        body = payload(first.piece) if first.piece else b""
        with contextlib.suppress(OSError, UpstreamProtocolError, PhaseTimeout):
            while not answer.whole and len(body) < TOLD_BYTES:
                piece = await conn.more(first.up)
                if not piece:
                    break
                body += payload(answer.feed(piece))
        return body[:TOLD_BYTES]

    def refuse(self, refusal: HttpError) -> None:
        self._mine.end("stream_error", "worker", str(refusal.code))
        self.cut_with(refusal.body())

    def cut_with(self, error: bytes) -> None:
        """An error event, and an end that nobody takes for a good one."""
        client = self._conn.client
        with contextlib.suppress(OSError):
            client.send(self._framed(b"data: %b\n\n" % error))
        client.close(reset=not self._chunked)


def _as_error(status: int, body: bytes) -> bytes:
    """The worker's own error where it is one of the usual shape."""
    try:
        told: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = None
    if isinstance(told, dict) and "error" in told:
        return msgspec.json.encode(told)
    text = body[:500].decode("utf-8", "replace")
    return error_body(f"the worker answered {status}: {text}", "upstream_error", status)
