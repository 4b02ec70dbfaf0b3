"""Relays a response to the client: its head, then chunk by chunk, each in the loop iteration in
which it arrived.

Contract: `relay` never raises because of the worker: after the first relayed byte there is no
retry, and a truncated response always ends abnormally (no last chunk, too few bytes, a reset).
`_relay_chunks` determines the cost per token, so it parses and awaits only what it must. The
worker's bytes are relayed unchanged if the client can read their framing. All headers of
note:omni-router 10 are written by `diagnostic_fields`, also for the fast path and local replies.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Generator
from math import inf
from typing import Any, Final, Protocol

from omni_proxy.dataplane.exchange.exchange import Exchange, GapRecorder, UnobservedGaps
from omni_proxy.dataplane.exchange.request_id import REQUEST_ID_NAME
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.stream import READ_BYTES, Stream
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout, await_direct, pause
from omni_proxy.dataplane.upstream.pool import ResponseStart
from omni_proxy.routing.cache_prediction import note_first_byte
from omni_proxy.wire.chunked import LAST_CHUNK, encode_chunk
from omni_proxy.wire.cors import drop_cors_fields
from omni_proxy.wire.errors import stream_error_event
from omni_proxy.wire.request import RequestHead, drop_fields
from omni_proxy.wire.response import (
    CHUNKED,
    CLOSE,
    LENGTH,
    Unchunker,
    UpstreamProtocolError,
    UpstreamResponse,
    add_reason_phrase,
)

END_BYTES = 32  # a chunk that only ends a stream is at most this large
GAPS_AT_ONCE = 256  # how many gaps are collected before they are counted
_UNOBSERVED = UnobservedGaps()


async def relay(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, start: ResponseStart
) -> bool:
    """Send the whole response to the client. Returns whether its connection continues.

    The result is recorded in `exchange`. Raises ClientDisconnected.
    """
    response, client, chunk = start.response, io.client, start.chunk
    exchange.status = response.status
    exchange.response_head_at = io.loop.now
    if response.sse or exchange.stream:
        exchange.stream = True
        io.deadline = inf
    keepalive = io.keepalive if io.keepalive is not None and io.keepalive.begun else None
    if keepalive is not None and not keepalive.continues_with(start):
        return await keepalive.replace_with_error(start)
    unchanged = response.framing is LENGTH and keepalive is None
    framing = None if unchanged else new_framing(start, head, begun=keepalive is not None)
    keep = head.keep_alive and not io.close_after_response
    keep &= framing is None or framing.self_delimiting
    keep &= start.all_sent or io.body_stream is None
    out = b"" if keepalive is not None else encode_head(exchange, start, head, keep=keep)
    watched = framing
    if io.watch is not None and io.watch.exchange is exchange:
        watched = io.watch.begin(chunk, framing)
    io.phase, exchange.relayed = "relay", True
    try:
        if chunk:
            _first_chunk(io, exchange, chunk)
            out += chunk if framing is None else framing.wrap(chunk)
        if client.pending or (response.is_complete and not keep):
            await _send(io, out)
        elif out:
            client.write_soon(out)
        if not response.is_complete:
            # A stream may last for hours: drop references that are not needed any more.
            out = chunk = head.lines = b""
            await _relay_rest(io, exchange, start, watched)
    except UpstreamProtocolError as error:
        return await _cut_response(io, exchange, start, framing, f"RemoteProtocolError: {error}")
    except PhaseTimeout as error:
        return await _time_out(io, exchange, start, framing, str(error))
    exchange.end("completed", "")
    io.upstream = io.keepalive = None
    start.release()
    return keep


def _first_chunk(io: ExchangeIO, exchange: Exchange, chunk: bytes) -> None:
    _body_begins(io, exchange)
    exchange.chunks = 1
    exchange.bytes_out = len(chunk)
    if io.settings.keeps_last_chunk or exchange.reads_usage():
        exchange.last_chunk = chunk


async def _relay_rest(
    io: ExchangeIO, exchange: Exchange, start: ResponseStart, framing: BodyFraming | None
) -> None:
    """Relay the body after the head was sent. Raises as `_relay_chunks`."""
    if start.chunk:
        io.set_timeout("relay", io.settings.timeouts.idle)
    else:
        io.set_timeout("first", io.settings.timeouts.first_byte)
    if io.keepalive is not None:
        await io.keepalive.for_first_chunk(start.stream, start.response)
    start.response.lines = b""
    await await_direct(_relay_chunks(io, exchange, start, framing))


def _body_begins(io: ExchangeIO, exchange: Exchange) -> None:
    """Record the first chunk. For a stream, which may last for minutes, it already is the success
    of a half-open request."""
    exchange.first_at = io.loop.now
    need = exchange.requirements
    if need is not None and need.prediction is not None:
        note_first_byte(need.prediction)
    if (
        exchange.half_open_id
        and exchange.stream
        and exchange.status < 500
        and exchange.worker is not None
    ):
        io.services.fleet.observe_success(exchange.worker, exchange.half_open_id)


@types.coroutine
def _relay_chunks(
    io: ExchangeIO, exchange: Exchange, start: ResponseStart, framing: BodyFraming | None
) -> Generator[Any, Any, None]:
    """Relay the rest of the body. Raises UpstreamProtocolError if it breaks, PhaseTimeout,
    ClientDisconnected.

    At each event, objects have to be loaded into the CPU caches again. So sums are kept in this
    frame until the end, and a bare `yield` replaces `await pause`.
    """
    upstream: Stream = start.stream
    client: Stream = io.client
    response, loop = start.response, io.loop
    idle, deadline = io.settings.timeouts.idle, io.deadline
    keeps_last_chunk = io.settings.keeps_last_chunk or exchange.reads_usage()
    gaps = _gap_recorder(io, exchange)
    late, before, longest = gaps.late, exchange.first_at, 0.0
    count, size, tail, chunk = exchange.chunks, exchange.bytes_out, exchange.last_chunk, start.chunk
    try:
        while not response.is_complete:
            if not upstream.readable:  # inlined: must_wait_for
                io.waiting_on = upstream
                yield
            elif io.count_read():
                yield
            try:
                received = upstream.read(READ_BYTES)
            except OSError as error:
                raise UpstreamProtocolError(error.strerror or "reset") from None
            if received is None:
                continue
            if not received:
                yield from _end_by_close(io, response, framing)
                return
            chunk = response.feed(received)
            now = loop.now
            if before:
                gap = now - before
                longest = gap if gap > longest else longest  # noqa: FURB136
                late.append(gap)
                if len(late) >= GAPS_AT_ONCE:
                    gaps.sort_in()
            else:
                _body_begins(io, exchange)
                io.phase = "relay"
            before = now
            tail = chunk if keeps_last_chunk and len(chunk) > END_BYTES else tail
            due = now + idle  # inlined: IoTask.set_timeout
            io.phase_deadline = due if due < deadline else deadline  # noqa: FURB136
            count += 1
            size += len(chunk)
            chunk = chunk if framing is None else framing.wrap(chunk)
            if client.pending or response.is_complete:  # pending: the client may be reading slowly
                yield from _send(io, chunk)
            else:
                client.write_soon(chunk)
    finally:
        exchange.longest_gap, exchange.chunks, exchange.bytes_out = longest, count, size
        exchange.last_chunk = tail
        start.chunk = chunk  # the last chunk sent, for `_cut_response`


def _gap_recorder(io: ExchangeIO, exchange: Exchange) -> GapRecorder:
    meters = io.services.recorders.meters
    recorder = meters.gap_histogram(exchange) if meters is not None and exchange.stream else None
    return _UNOBSERVED if recorder is None else recorder


async def _end_by_close(
    io: ExchangeIO, response: UpstreamResponse, framing: BodyFraming | None
) -> None:
    """The worker closed, which is the regular end only of a body that is framed by close. Raises
    UpstreamProtocolError for any other."""
    if response.framing is not CLOSE:
        raise UpstreamProtocolError("the worker closed before the end of the response")
    await _send(io, framing.last() if framing is not None else b"")


async def _send(io: ExchangeIO, chunk: bytes) -> None:
    """Send the whole chunk now, after the pending bytes. Raises ClientDisconnected."""
    client = io.client
    client.flush()
    sent = 0
    if not client.pending:
        try:
            sent = client.send(chunk)
        except BlockingIOError:
            pass
        except OSError:
            raise ClientDisconnected from None
    if client.pending or sent < len(chunk):
        await _send_slowly(io, memoryview(chunk)[sent:])


async def _send_slowly(io: ExchangeIO, view: memoryview) -> None:
    """Wait for a client that reads more slowly than the worker sends; the worker is not read in
    that time."""
    phase, client = io.phase, io.client
    io.set_timeout("client", io.settings.timeouts.idle)
    while True:
        if not client.pending:
            try:
                view = view[client.send(view) :]
            except BlockingIOError:
                pass
            except OSError:
                raise ClientDisconnected from None
            else:
                io.set_timeout("client", io.settings.timeouts.idle)
            if not view:
                break
        io.waiting_on = client
        await pause
        io.check_client(half_close_aborts=io.settings.half_close_aborts)
    io.phase = phase


async def _time_out(
    io: ExchangeIO,
    exchange: Exchange,
    start: ResponseStart,
    framing: BodyFraming | None,
    phase: str,
) -> bool:
    if phase == "client":
        exchange.end("client_stalled", "client", "the client stopped reading", phase="client")
        io.client.close(reset=True)
        return False
    if io.loop.now < io.deadline:
        reason = f"ReadTimeout: the worker stopped sending (phase {phase})"
    else:  # the worker did not stall: the proxy ends the exchange
        exchange.end("timed_out", "proxy", "the exchange took longer than request_timeout_secs")
        reason = exchange.error
    return await _cut_response(io, exchange, start, framing, reason)


async def _cut_response(
    io: ExchangeIO,
    exchange: Exchange,
    start: ResponseStart,
    framing: BodyFraming | None,
    reason: str,
) -> bool:
    """The response can't be completed: send an error event if its framing allows one, then close.

    The proxy's own framing always allows it; the worker's chunks only between two of them.
    """
    response, client = start.response, io.client
    exchange.end("stream_error" if exchange.stream else "upstream_error", "worker", reason)
    has_place = framing is not None or (
        response.framing is CHUNKED and response.is_between_chunks(start.chunk)
    )
    raw = framing is not None and not framing.self_delimiting
    client.flush()
    if response.sse and has_place and not client.pending:
        event = b"\n\n" + stream_error_event(f"upstream stream failed before completion: {reason}")
        with contextlib.suppress(OSError):
            client.send(event if raw else encode_chunk(event))
    # If the body is framed by close, only a reset marks it as incomplete.
    client.close(reset=raw)
    return False


_ATTEMPT: Final = b"\r\nX-SGLang-Omni-Route-Attempt: %d\r\n"
_FIRST_ATTEMPT: Final = _ATTEMPT % 1  # formatted once, because formatting is slow


def diagnostic_fields(exchange: Exchange) -> tuple[bytes, ...]:
    """Diagnostic header lines of a response, in parts: the worker, the request id, the number of
    the attempt, and each attempt's result if one failed."""
    worker = exchange.worker or exchange.last_worker
    worker_line = worker.route_line if worker is not None else b""
    if exchange.failed_attempts is None:
        if exchange.caller is None or not exchange.caller.has_rates:
            return worker_line, REQUEST_ID_NAME, exchange.request_id, _FIRST_ATTEMPT
        rates = rate_lines(exchange)
        return worker_line, REQUEST_ID_NAME, exchange.request_id, _FIRST_ATTEMPT, rates
    return _fields_of_attempts(exchange, worker_line)


def _fields_of_attempts(exchange: Exchange, worker_line: bytes) -> tuple[bytes, ...]:
    """`diagnostic_fields` after a failed attempt."""
    number = _ATTEMPT % exchange.attempts
    results = ", ".join(
        f"{worker.display_id}={result}" for worker, result in exchange.attempt_results()
    )
    results_line = b"x-omni-attempts: %b\r\n" % results.encode("latin-1", "replace")
    parts = worker_line, REQUEST_ID_NAME, exchange.request_id, number, results_line
    return (*parts, rate_lines(exchange))


def rate_lines(exchange: Exchange) -> bytes:
    """Header lines with the rates of the exchange's caller, at the time of its last phase."""
    caller = exchange.caller
    if caller is None or not caller.has_rates:
        return b""
    return caller.rate_lines(exchange.response_head_at or exchange.sent_at or exchange.head_at)


def version_fields(exchange: Exchange) -> bytes:
    """Header lines with the weight version at the start of the attempt, and the current one if it
    differs."""
    start_version, worker = exchange.weight_version, exchange.worker
    if worker is None or worker.weight_version is start_version:
        return start_version.lines
    return start_version.lines + worker.weight_version.end_header_lines(start_version)


def encode_head(
    exchange: Exchange, start: ResponseStart, head: RequestHead, *, keep: bool
) -> bytes:
    """The head for the client. `keep`: its connection continues after this response."""
    response = start.response
    parts: list[bytes]
    if exchange.route is None:
        parts = [add_reason_phrase(response)]
    else:
        lines = drop_cors_fields(response.lines) if head.origin else response.lines
        parts = [lines, *diagnostic_fields(exchange), version_fields(exchange)]
        if head.origin:
            parts.append(exchange.cors)
    if exchange.request_id_line:
        name = exchange.request_id_line.partition(b":")[0].lower()
        parts[0] = drop_fields(parts[0], frozenset((name,)))
        parts.append(exchange.request_id_line)
    if not start.bodiless and not head.http_1_0 and response.framing is not LENGTH:
        parts.append(b"transfer-encoding: chunked\r\n")
    if not keep:
        parts.append(b"connection: close\r\n")
    elif head.http_1_0:
        parts.append(b"connection: keep-alive\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


class BodyFraming:
    """Changes chunks of a body for a client that can't read the worker's framing. `wrap`: changes a
    chunk. `last`: returns the bytes to send after a body that is framed by close."""

    __slots__ = ("last", "self_delimiting", "wrap")

    def __init__(
        self,
        wrap: Callable[[bytes], bytes],
        last: Callable[[], bytes] = bytes,
        *,
        self_delimiting: bool,
    ) -> None:
        self.wrap = wrap
        self.last = last
        self.self_delimiting = self_delimiting  # its end is visible without closing the connection


def new_framing(start: ResponseStart, head: RequestHead, *, begun: bool) -> BodyFraming | None:
    """None if the worker's bytes are relayed unchanged. `begun`: the proxy has already begun a
    chunked response."""
    response = start.response
    if isinstance(start, RewrittenResponse):
        return _rewriting(start, head)
    if start.bodiless and not begun:
        return None
    if response.framing is CHUNKED:
        return BodyFraming(Unchunker().feed, self_delimiting=False) if head.http_1_0 else None
    if head.http_1_0:
        return BodyFraming(bytes, self_delimiting=False)
    if response.framing is LENGTH:
        return BodyFraming(lambda chunk: _as_last_chunk(chunk, response), self_delimiting=True)
    return BodyFraming(encode_chunk, lambda: LAST_CHUNK, self_delimiting=True)


class StreamRewriter(Protocol):
    """Changes the payload of an event stream; buffers incomplete events."""

    def feed(self, payload: bytes) -> bytes:
        """Raises UpstreamProtocolError."""

    def finish(self) -> bytes: ...


class RewrittenResponse(ResponseStart):
    """A stream whose payload is changed, so that the proxy frames it."""

    rewriter: StreamRewriter | None = None


def _rewriting(start: RewrittenResponse, head: RequestHead) -> BodyFraming:
    response, rewriter = start.response, start.rewriter
    assert rewriter is not None
    unwrap = Unchunker().feed if response.framing is CHUNKED else bytes

    def rewrite(chunk: bytes) -> bytes:
        payload = rewriter.feed(unwrap(chunk))
        return payload + rewriter.finish() if response.is_complete else payload

    def rewrite_chunk(chunk: bytes) -> bytes:
        payload = rewrite(chunk)
        framed = encode_chunk(payload) if payload else b""
        return framed + LAST_CHUNK if response.is_complete else framed

    def last_chunk() -> bytes:
        rest = rewriter.finish()
        return encode_chunk(rest) + LAST_CHUNK if rest else LAST_CHUNK

    if head.http_1_0:
        return BodyFraming(rewrite, rewriter.finish, self_delimiting=False)
    return BodyFraming(rewrite_chunk, last_chunk, self_delimiting=True)


def _as_last_chunk(chunk: bytes, response: UpstreamResponse) -> bytes:
    """Encode a chunk of a body with a content-length; the last one also ends the chunked body."""
    return encode_chunk(chunk) + LAST_CHUNK if response.is_complete else encode_chunk(chunk)
