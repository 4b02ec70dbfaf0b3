"""SSE keep-alive: comments before the first event of a stream, so that no hop closes it as idle.

`[server] sse_keepalive_secs` enables it. Comments follow the worker's head if that has arrived;
otherwise the proxy begins the response itself: 200, an event stream. Contract: at that time no byte
of a worker was sent, so retries continue as before; a response with another status becomes an error
event, and the stream is ended abnormally.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import msgspec

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.request_id import REQUEST_ID_NAME
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout, Readable, pause
from omni_proxy.dataplane.upstream.pool import ResponseStart
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.wire.aborted_reply import AbortedReply
from omni_proxy.wire.chunked import LAST_CHUNK, encode_chunk
from omni_proxy.wire.errors import HttpError, error_body
from omni_proxy.wire.forwarded import field_value
from omni_proxy.wire.request import RequestHead, drop_fields
from omni_proxy.wire.response import Framing, Unchunker, UpstreamProtocolError, UpstreamResponse

COMMENT: Final = b": keep-alive\n\n"
ERROR_BYTES: Final = 16384  # limit of a response that becomes an error event


class SseKeepAlive:
    """The keep-alive of one exchange. `begun`: the proxy has begun the response."""

    __slots__ = ("_chunked", "_exchange", "_io", "_secs", "begun", "may_begin")

    def __init__(self, io: ExchangeIO, exchange: Exchange, head: RequestHead) -> None:
        self._io = io
        self._exchange = exchange
        self._secs = io.settings.timeouts.sse_keepalive
        self._chunked = not head.http_1_0
        self.begun = False
        # A stream of speech may be plain audio, in which comments are not allowed.
        self.may_begin = exchange.route is not None and not exchange.route.traffic.startswith(
            "speech"
        )
        head.lines = drop_fields(
            head.lines, frozenset((b"accept-encoding",))
        )  # the comments are not compressed

    async def for_head(self, upstream: Readable) -> None:
        """Pause until `upstream` has an event."""
        if self.may_begin:
            await self._pause(upstream)
        else:
            await pause

    async def for_first_chunk(self, upstream: Stream, response: UpstreamResponse) -> None:
        """Wait until `upstream` may have the first chunk of an event stream."""
        plain = (
            not self._exchange.first_at
            and response.sse
            and not field_value(response.lines, b"content-encoding")
        )
        if plain and (self.begun or response.framing is not Framing.LENGTH):
            while not upstream.readable:
                self._io.waiting_on = upstream
                await self._pause(upstream)

    async def _pause(self, upstream: Readable) -> None:
        """Pause, and send comments meanwhile. Raises PhaseTimeout at the end of the phase."""
        io = self._io
        due = io.phase_deadline
        try:
            while True:
                io.phase_deadline = min(due, io.loop.now + self._secs)
                try:
                    await pause
                except PhaseTimeout:
                    if io.loop.now > due:
                        raise
                    await self._send_comment()
                    if not upstream.readable:
                        io.waiting_on = upstream
                        continue
                return
        finally:
            io.phase_deadline = due

    async def _send_comment(self) -> None:
        chunk = self._framed(COMMENT)
        if not self.begun and not self._exchange.relayed:
            self.begun = True
            chunk = self._head() + chunk
        io = self._io
        io.set_timeout(io.phase, io.settings.timeouts.idle)
        try:
            await io.write(io.client, chunk)
        except PhaseTimeout:
            self._exchange.end(
                "client_stalled", "client", "the client stopped reading", phase="client"
            )
            io.client.close(reset=True)
            raise ClientDisconnected from None
        except OSError:
            raise ClientDisconnected from None

    def _framed(self, chunk: bytes) -> bytes:
        return encode_chunk(chunk) if self._chunked else chunk

    def _head(self) -> bytes:
        request_id_line = REQUEST_ID_NAME + self._exchange.request_id + b"\r\n"
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b"connection: close\r\n"
        return (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
            b"%b%b%b%b\r\n"
            % (request_id_line, self._exchange.request_id_line, self._exchange.cors, framing)
        )

    def continues_with(self, start: ResponseStart) -> bool:
        """Whether the worker's body can follow the response that was begun."""
        response = start.response
        plain = response.status == 200 and response.sse and not start.bodiless
        return plain and not field_value(response.lines, b"content-encoding")

    async def replace_with_error(self, start: ResponseStart) -> bool:
        """Send a response that is no event stream as an error event. Returns False: the connection
        ends."""
        io, exchange, response = self._io, self._exchange, start.response
        exchange.relayed = True
        body = await self._body_of(start)
        exchange.end(
            "stream_error", "worker", f"status={response.status} after the stream was begun"
        )
        self._cut_off(_as_error(response.status, body))
        start.close()
        io.upstream = None
        return False

    async def _body_of(self, start: ResponseStart) -> bytes:
        io, response = self._io, start.response
        payload = Unchunker().feed if response.framing is Framing.CHUNKED else bytes
        io.set_timeout("relay", io.settings.timeouts.idle)
        body = payload(start.chunk) if start.chunk else b""
        with contextlib.suppress(OSError, UpstreamProtocolError, PhaseTimeout):
            while not response.is_complete and len(body) < ERROR_BYTES:
                chunk = await io.read(start.stream)
                if not chunk:
                    break
                body += payload(response.feed(chunk))
        return body[:ERROR_BYTES]

    def reject(self, error: HttpError) -> None:
        if isinstance(error, AbortedReply):
            self._end_as_aborted(error)
            return
        self._exchange.end("stream_error", "worker", str(error.code))
        self._cut_off(error.body())

    def _end_as_aborted(self, reply: AbortedReply) -> None:
        """Send the events of the reply, and end regularly."""
        self._exchange.end("refused", "proxy", str(reply.code))
        client = self._io.client
        with contextlib.suppress(OSError):
            client.send(self._framed(reply.body()) + (LAST_CHUNK if self._chunked else b""))
        client.close()

    def _cut_off(self, error: bytes) -> None:
        """Send an error event, and end the response abnormally."""
        client = self._io.client
        with contextlib.suppress(OSError):
            client.send(self._framed(b"data: %b\n\n" % error))
        client.close(reset=not self._chunked)


def _as_error(status: int, body: bytes) -> bytes:
    """The worker's own error if it has the usual shape, else a new one."""
    try:
        error: Any = msgspec.json.decode(body)
    except MALFORMED:
        error = None
    if isinstance(error, dict) and "error" in error:
        return msgspec.json.encode(error)
    text = body[:500].decode("utf-8", "replace")
    return error_body(f"the worker answered {status}: {text}", "upstream_error", status)
