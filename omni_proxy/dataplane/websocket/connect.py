"""Connects a speech session to a worker: pick, dial, WebSocket handshake, retry if allowed.

Contract: no message of the session was sent to a worker whose attempt failed. Only failed
connections and the statuses that count against a worker's health are reported, as for any other
response (`dataplane/attempt/retry`). Source: note:omni-router 12, RFC 6455.
"""

from __future__ import annotations

from typing import Final

from wsproto.utilities import generate_nonce

from omni_proxy.dataplane.attempt.attempt import AttemptFailed, lines_for_rank
from omni_proxy.dataplane.attempt.outlier_reports import report_failure, report_success
from omni_proxy.dataplane.attempt.retry import RetryState
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import PhaseTimeout
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.credentials import lines_with_own_key
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead
from omni_proxy.wire.response import UpstreamProtocolError, check_interim, find_response_head_end
from omni_proxy.wire.websocket import encode_handshake, parse_handshake_response

# Kinds of a response with another status than 101; the client's error event has them as `reason`.
REFUSED: Final = "status"
UNAVAILABLE: Final = "503"


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
