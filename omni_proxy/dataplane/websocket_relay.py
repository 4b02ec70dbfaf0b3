"""The WebSocket route: a speech session between a client and one worker.

The client's handshake is accepted first, because only its first message determines the worker; from
then on every error is an error event and a close frame. Frames are relayed both ways, and each side
is read only while the other accepts all bytes (back-pressure). A client's messages are forwarded
whole, so that no part of one above its limit reaches a worker; a worker's in chunks as they arrive.
A retry is possible until a worker has accepted the session: no message of it was sent before. Only
failed connections and the statuses that count against a worker's health are reported, as for any
other response. Source: note:omni-router 12, RFC 6455.
"""

from __future__ import annotations

from typing import Final

from wsproto.connection import ConnectionType
from wsproto.events import CloseConnection, Message
from wsproto.utilities import generate_nonce

from omni_proxy.dataplane.admission.caller_admission import reserve
from omni_proxy.dataplane.attempt.attempt import AttemptFailed, lines_for_rank
from omni_proxy.dataplane.attempt.outlier_reports import report_failure, report_success
from omni_proxy.dataplane.attempt.retry import RetryState
from omni_proxy.dataplane.exchange.exchange import Exchange, Outcome
from omni_proxy.dataplane.exchange.request_id import REQUEST_ID_NAME, add_forwarded, new_request_id
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.stream import READ_BYTES, Stream
from omni_proxy.dataplane.loop.task import ANY_STREAM, ClientDisconnected, PhaseTimeout, pause
from omni_proxy.dataplane.relay.response_relay import rate_lines
from omni_proxy.dataplane.upstream.fleet_requirements import (
    RequestParts,
    complete_requirements,
    pin_request,
)
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.model_field import session_spans, with_model
from omni_proxy.routing.inspect.requirements import (
    RequestFacts,
    Requirements,
    inspect_session,
)
from omni_proxy.shared.engine_protocol import (
    SPEECH_CONFIG_BYTES,
    SPEECH_CONFIG_SECS,
    SPEECH_MESSAGE_BYTES,
)
from omni_proxy.upstream_http.credentials import lines_with_own_key
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead
from omni_proxy.wire.response import UpstreamProtocolError, check_interim, find_response_head_end
from omni_proxy.wire.websocket import (
    SpeechEvents,
    WebSocketFrames,
    accept_handshake,
    close_code,
    encode_handshake,
    error_event,
    is_application_code,
    parse_handshake_response,
)

CONFIG_READ_BYTES: Final = 32768  # bounds the work of parsing the smallest frames
BYTES_PER_READ: Final = 1024  # parsing this many bytes of tiny frames costs as much as a read
CLOSE_SECS: Final = 2.0  # how long both sides may take to reply to the close frame
# Kinds of a response with another status than 101; the client's error event has them as `reason`.
REFUSED: Final = "status"
UNAVAILABLE: Final = "503"


class _SessionEnd(Exception):
    """Ends the session: close code and reason for both sides; `error`: sent to the client first."""

    def __init__(self, code: int, reason: str, error: HttpError | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.error = error


async def session(io: ExchangeIO, exchange: Exchange, head: RequestHead) -> bool:
    """Serve the whole session; returns False: the connection can't be reused.

    Raises HttpError for an invalid handshake, ClientDisconnected if the client closes without a
    close frame.
    """
    exchange.request_id = head.request_id or new_request_id()
    if io.settings.forwarded is not None:
        add_forwarded(io.settings.forwarded, exchange, head)
    id_line = REQUEST_ID_NAME + exchange.request_id + b"\r\n"
    lines = id_line + exchange.request_id_line + rate_lines(exchange)
    head_bytes = accept_handshake(head, lines)
    exchange.status, exchange.stream, exchange.relayed = 101, True, True
    speech_session = _Session(io, exchange)
    speech_session.down.out += head_bytes
    try:
        try:
            await speech_session.run(head)
        except HttpError as error:
            exchange.end("refused", "proxy", str(error.code))
            raise _SessionEnd(close_code(error.status), error.message, error) from None
    except _SessionEnd as end:
        await speech_session.close(end)
    return False


class _Session:
    """Both sides of one session, and its events so far."""

    def __init__(self, io: ExchangeIO, exchange: Exchange) -> None:
        self.io = io
        self.exchange = exchange
        self.down = WebSocketFrames(ConnectionType.SERVER)
        self.up = WebSocketFrames(ConnectionType.CLIENT)
        self.speech_events = SpeechEvents()

    async def run(self, head: RequestHead) -> None:
        """Run the session, from the client's first message to its end.

        Raises _SessionEnd, HttpError, ClientDisconnected.
        """
        io, exchange = self.io, self.exchange
        await io.services.queue.wait_for_slot(io, exchange, unread=False)
        first = await self._first_message()
        exchange.body_at = io.loop.now
        route = exchange.route
        assert route is not None
        need = exchange.requirements = inspect_session(route, first, RequestFacts(b"", head.hints))
        balancer, fleet, now = io.services.balancer, io.services.fleet, io.loop.now
        reserve(exchange, need, fleet, len(first), now)
        parts = RequestParts(route, (head.lines,), b"", hints=head.hints, takes_pair=False)
        pin_request(balancer, fleet, need, parts, now)
        complete_requirements(balancer, fleet, need, parts)
        if need.alias is not None and need.alias.split.rewrite:
            need.alias.spans = session_spans(first)
        io.services.inflight.hold(exchange, len(first))
        worker, chunk = await connect_worker(io, exchange, head)
        io.services.inflight.release_body(exchange)
        self.up.send(_for_target(first, need))
        self.up.feed(chunk)
        try:
            await self._relay(io.client, worker)
        except PhaseTimeout:
            self._on_idle_timeout()

    async def _first_message(self) -> str | bytes:
        io = self.io
        limit = min(io.settings.limits.max_body, SPEECH_CONFIG_BYTES)
        io.set_timeout("config", SPEECH_CONFIG_SECS)
        chunk, io.unread = io.unread, b""
        try:
            while True:
                self.down.feed(chunk)
                message = self._next_client_message(limit)
                self._flush_client()
                if message is not None:
                    return message
                chunk = await io.read(io.client, CONFIG_READ_BYTES)
                if not chunk:
                    raise ClientDisconnected
                self.exchange.bytes_in += len(chunk)
                io.reads_since_pause += len(chunk) // BYTES_PER_READ
        except PhaseTimeout:
            message = "session.config was not received before timeout"
            raise HttpError(400, message, 400) from None
        except OSError:
            raise ClientDisconnected from None

    async def _relay(self, client: Stream, worker: Stream) -> None:
        """Relay frames both ways until one side ends it.

        Raises _SessionEnd, HttpError, ClientDisconnected, PhaseTimeout.
        """
        io, down, up = self.io, self.down, self.up
        idle = io.settings.timeouts.idle
        self._send_client_messages()
        self._relay_worker_events()
        io.set_timeout("relay", idle)
        while True:
            progress = self._flush_client() | self._flush_worker(worker)
            if not down.out:
                progress |= self._read_worker(worker)
            if not up.out:
                progress |= self._read_client(client)
            elif client.peer_closed:
                # The worker does not accept the client's last bytes, and no reply can be sent.
                raise ClientDisconnected
            if progress:
                io.set_timeout("relay", idle)
                if io.count_read():
                    await pause
            else:
                io.waiting_on = ANY_STREAM
                await pause

    def _flush_client(self) -> bool:
        try:
            sent = self.io.client.send_from(self.down.out)
        except OSError:
            raise ClientDisconnected from None
        self.exchange.bytes_out += sent
        return sent > 0

    def _flush_worker(self, worker: Stream) -> bool:
        try:
            return worker.send_from(self.up.out) > 0
        except OSError:
            self.up.out.clear()  # bytes that it sent before the error must still be read
            return True

    def _read(self, sock: Stream) -> bytes | None:
        """Received bytes: None if none have arrived, b"" at the end. Raises OSError."""
        chunk = sock.read(READ_BYTES) if sock.readable else None
        if chunk:
            self.io.reads_since_pause += len(chunk) // BYTES_PER_READ
        return chunk

    def _read_client(self, client: Stream) -> bool:
        try:
            chunk = self._read(client)
        except OSError:
            raise ClientDisconnected from None
        if chunk is None:
            return False
        if not chunk:
            raise ClientDisconnected
        self.exchange.bytes_in += len(chunk)
        self.down.feed(chunk)
        self._send_client_messages()
        return True

    def _send_client_messages(self) -> None:
        limit = min(self.io.settings.limits.max_body, SPEECH_MESSAGE_BYTES)
        while (message := self._next_client_message(limit)) is not None:
            self.up.send(message)

    def _next_client_message(self, limit: int) -> str | bytes | None:
        """The client's next whole message, None until more bytes arrive.

        Raises _SessionEnd, HttpError 413.
        """
        for event in self.down.events():
            if isinstance(event, CloseConnection):
                ended: Outcome = "refused" if self.down.broken else "stream_cancelled"
                self.exchange.end(ended, "client", _close_text(event))
                raise _SessionEnd(event.code, event.reason or "")
            if isinstance(event, Message):
                message = self.down.join(event, limit)
                if message is not None:
                    return message
        return None

    def _read_worker(self, worker: Stream) -> bool:
        try:
            chunk = self._read(worker)
        except OSError as error:
            raise self._worker_closed(None, f"ReadError: {error.strerror or error}") from None
        if chunk is None:
            return False
        if not chunk:
            raise self._worker_closed(None, "RemoteProtocolError: no closing frame")
        self.up.feed(chunk)
        self._relay_worker_events()
        return True

    def _relay_worker_events(self) -> None:
        exchange, speech_events = self.exchange, self.speech_events
        for event in self.up.events():
            if isinstance(event, CloseConnection):
                raise self._worker_closed(event, _close_text(event))
            if not isinstance(event, Message) or not (event.data or event.message_finished):
                continue
            self.down.send(event.data, finished=event.message_finished)
            exchange.first_at = exchange.first_at or self.io.loop.now
            exchange.chunks += 1
            if isinstance(event.data, str):
                speech_events.feed(event.data, finished=event.message_finished)
                if speech_events.done and speech_events.failed_audio:
                    exchange.end("stream_error", "worker", "audio.done with error")
                elif speech_events.done:
                    exchange.end("completed", "")

    def _worker_closed(self, close: CloseConnection | None, reason_text: str) -> _SessionEnd:
        """The end of the session after the worker's close: regular, an application error, or a
        failure."""
        exchange, speech_events = self.exchange, self.speech_events
        message = "upstream WebSocket closed before session.done"
        code, reason = (1000, "") if speech_events.done else (1011, message)
        if close is not None and not self.up.broken:
            code, reason = close.code, close.reason or ""
        exchange.end("stream_error", "worker", reason_text)
        if (
            speech_events.done
            or speech_events.error
            or (close is not None and is_application_code(code))
        ):
            return _SessionEnd(code, reason)
        self._report_failure(reason_text)
        error = HttpError(502, message, 502, type="upstream_error")
        return _SessionEnd(1011 if self.down.in_message else code, reason, error)

    def _report_failure(self, error: str) -> None:
        worker = self.exchange.worker
        assert worker is not None
        report_failure(self.io.services.fleet, self.exchange, worker, error)

    def _on_idle_timeout(self) -> None:
        """No byte was relayed for idle_secs. Raises HttpError if the client can still get it."""
        if self.down.out:
            self.exchange.end("client_stalled", "client", "the client stopped reading")
            self.io.client.close(reset=True)
        elif self.up.out:
            self._report_failure("WriteTimeout: the worker stopped reading")
            self.exchange.end("upstream_error", "worker", "WriteTimeout")
            raise HttpError(504, "upstream WebSocket failed", 504, type="upstream_error")
        else:
            raise HttpError(408, "the session was silent for too long", 408)

    async def close(self, end: _SessionEnd) -> None:
        """Send close frames and drain both sides: closing with unread bytes would reset the
        connection."""
        io, down, worker = self.io, self.down, self.io.upstream
        if end.error is not None and not down.in_message:
            down.send(error_event(end.error))
        down.close(end.code, end.reason)
        self.up.close(end.code, end.reason)
        if worker is not None:
            self._flush_worker(worker)
        try:
            io.set_timeout("client", io.settings.timeouts.idle)
            await io.write(io.client, bytes(down.out))
            io.set_timeout("linger", CLOSE_SECS)
            if worker is not None:
                if not self.up.broken:
                    await self._drain_until_closed(worker, self.up)
                worker.close()
            await self._drain_until_closed(io.client, down)
        except PhaseTimeout:
            io.client.close(reset=io.phase == "client")
        except OSError:
            raise ClientDisconnected from None

    async def _drain_until_closed(self, sock: Stream, frames: WebSocketFrames) -> None:
        while frames.broken or not frames.left:
            try:
                chunk = await self.io.read(sock)
            except OSError:
                return
            if not chunk:
                return
            frames.feed(chunk)
            for _ in frames.events():
                pass


def _for_target(first: str | bytes, need: Requirements) -> str | bytes:
    """The client's first message, with the model of the alias's target if it names a model."""
    alias, model = need.alias, need.target_model
    if alias is None or model is None or not alias.spans:
        return first
    text = first.encode() if isinstance(first, str) else first
    rewritten = b"".join(with_model(text, alias.spans, model, is_json=True))
    return rewritten.decode() if isinstance(first, str) else rewritten


def _close_text(close: CloseConnection) -> str:
    return f"closed with code {int(close.code)} {close.reason or ''}".rstrip()


async def connect_worker(
    io: ExchangeIO, exchange: Exchange, head: RequestHead
) -> tuple[Stream, bytes]:
    """The stream to a worker that responded 101, and the bytes after that head.

    Raises HttpError, ClientDisconnected.
    """
    services, need = io.services, exchange.requirements
    assert need is not None
    exchange.policy = services.balancer.policy.name
    retry: RetryState | None = None
    try:
        worker = services.balancer.acquire(exchange)
    except HttpError as error:
        worker = await _wait_for_worker(io, exchange, error)
    while True:
        try:
            stream_and_rest = await _open(io, exchange, head, worker)
        except AttemptFailed as error:
            io.close_upstream()
            retry = retry or RetryState(io, exchange, 0)
            kind = error.kind
            if kind in (REFUSED, UNAVAILABLE):
                kind = str(error.status)
                retry.report_status(worker, error.status)
            else:
                report_failure(services.fleet, exchange, worker, error.error)
            try:
                worker = await retry.next_worker(kind, _client_error(error))
            except HttpError:
                exchange.end("upstream_error", "worker", error.error)
                raise
        else:
            report_success(services.fleet, exchange, worker)
            return stream_and_rest


async def _wait_for_worker(io: ExchangeIO, exchange: Exchange, error: HttpError) -> Worker:
    try:
        return await io.services.queue.wait_for_worker(io, exchange, error)
    except HttpError as refusal:
        raise _with_numeric_code(refusal) from None


async def _open(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, worker: Worker
) -> tuple[Stream, bytes]:
    """Dial and do the handshake, under one timeout. Raises AttemptFailed."""
    pool, nonce = io.services.upstream_pools.of(exchange.rank or worker), generate_nonce()
    io.set_timeout("dial", io.settings.config.health.timeout_secs)
    try:
        upstream = io.upstream = await pool.dial(io)
        exchange.sent_at = io.loop.now
        io.phase = "wait"
        lines = lines_with_own_key(worker, lines_for_rank(exchange, head))
        if exchange.trace is not None:
            lines = exchange.trace.lines_for_attempt(lines, exchange.sent_to, io.loop.now)
        await io.write(upstream, encode_handshake(lines, pool.own_lines, nonce))
        status, rest = await _read_status(io, upstream, nonce)
    except OSError as error:
        dialled = io.upstream is not None
        kind = "reset_before_response" if dialled else "connect_failure"
        raise AttemptFailed(kind, f"ConnectError: {error.strerror or error}") from None
    except UpstreamProtocolError as error:
        raise AttemptFailed("bad_response", f"RemoteProtocolError: {error}") from None
    except PhaseTimeout as error:
        if str(error) == "dial":
            raise AttemptFailed(
                "connect_failure", "ConnectTimeout: no connection in time"
            ) from None
        late = "ReadTimeout: no response to the handshake in time"
        raise AttemptFailed("response_timeout", late, 504) from None
    if status != 101:
        kind = UNAVAILABLE if status == 503 else REFUSED
        raise AttemptFailed(kind, f"status={status}", status)
    exchange.response_head_at = io.loop.now
    return upstream, rest


async def _read_status(io: ExchangeIO, upstream: Stream, nonce: bytes) -> tuple[int, bytes]:
    """The status of the response, and the bytes after its head. Skips 1xx other than 101."""
    buffer, heads = b"", 0
    while True:
        while end := find_response_head_end(buffer):
            status = parse_handshake_response(buffer[:end], nonce)
            buffer = buffer[end:]
            if status == 101 or status >= 200:
                return status, buffer
            heads += 1
            check_interim(heads)
        chunk = await io.read(upstream)
        if not chunk:
            raise UpstreamProtocolError("it closed without a response to the handshake")
        buffer += chunk


def _with_numeric_code(error: HttpError) -> HttpError:
    """The error for an error event, whose `code` is the status and whose `reason` is separate."""
    if isinstance(error.code, int):
        return error
    return HttpError(error.status, error.message, error.status, reason=error.code)


def _client_error(error: AttemptFailed) -> HttpError:
    """The error for the client if no worker accepted the session."""
    code, reason = error.status, error.kind
    if code == 429:
        message = "upstream WebSocket is overloaded"
        return HttpError(429, message, code, type="overloaded_error", reason=reason)
    if code == 503:
        message = "upstream WebSocket is unavailable"
        return HttpError(503, message, code, type="server_error", reason=reason)
    if 400 <= code < 500:
        message = "upstream WebSocket rejected the request"
        return HttpError(400, message, code, type="upstream_error", reason=reason)
    message = "upstream WebSocket failed"
    return HttpError(502, message, code, type="upstream_error", reason=reason)
