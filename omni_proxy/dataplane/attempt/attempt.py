"""One attempt at an upstream: a connection, the request on it, and the head of the response.

Contract: nothing has been sent to the client yet, so every failure is an AttemptFailed and the
caller may retry. If an idle connection broke without a byte, a new one is dialled once, without
counting an attempt (RFC 9112 9.3.1). All requests are written by `encode_request`, also those of
the fast path.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from math import inf
from typing import Any, Final

import msgspec

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange_io import AttemptIO, StreamedBody
from omni_proxy.dataplane.loop.stream import READ_BYTES, Stream
from omni_proxy.dataplane.loop.task import PhaseTimeout, pause
from omni_proxy.dataplane.upstream.pool import ResponseStart, UpstreamPool
from omni_proxy.dataplane.upstream.response_reports import own_lines_of, read_load, take_load
from omni_proxy.fleet.registry import Fleet
from omni_proxy.routing.model_aliases import parts_for_target
from omni_proxy.routing.pinning import body_for_rank
from omni_proxy.system.fd_limit import is_resource_exhaustion
from omni_proxy.upstream_http.credentials import lines_with_own_key
from omni_proxy.wire.errors import HttpError, UpstreamError
from omni_proxy.wire.head_caching.response_heads import ResponseHeadCache
from omni_proxy.wire.header_fields import RANK_HINT, RANK_NAME
from omni_proxy.wire.request import RequestHead, drop_fields
from omni_proxy.wire.response import UpstreamProtocolError, check_interim, find_response_head_end

JOIN_BYTES: Final = READ_BYTES  # a request that was received in one read is sent in one send
CACHED_LENGTHS: Final = 4096
# An idle connection broke without a byte: the worker may or may not have read the request.
STALE_CONNECTION: Final = "stale_connection"
_Parts = Sequence[bytes | memoryview]
_BLANK: Final = b"\r\n\r\n"
RANK_FIELD: Final = frozenset((RANK_NAME,))


def _format_length(size: int) -> tuple[bytes, bytes]:
    return b"%d" % size, b"content-length: %d\r\n\r\n" % size


# Looking up a length touches far fewer cache lines than formatting it.
LENGTHS: Final = tuple(map(_format_length, range(CACHED_LENGTHS)))


def length_lines(size: int) -> tuple[bytes, bytes]:
    """The length of a body: its digits, and the content-length line with the blank line."""
    return LENGTHS[size] if size < CACHED_LENGTHS else _format_length(size)


class AttemptFailed(UpstreamError):
    """`kind`: as in `retry_on`. `status`: for the client, if no other attempt follows."""

    def __init__(self, kind: str, error: str, status: int = 502) -> None:
        super().__init__(error)
        self.kind = kind
        self.error = error
        self.status = status


class _ConnectionBroken(Exception):
    """The connection to the worker ended before the head of a response was complete."""

    def __init__(self, reason: str, *, silent: bool) -> None:
        super().__init__(reason)
        self.silent = silent  # no byte of the response was received


class SentRequest(msgspec.Struct, gc=False):
    """A request that was already sent to an upstream."""

    pool: UpstreamPool
    stream: Stream
    received: bytes = b""  # bytes of its response that were already read
    error: BaseException | None = None  # to raise: a timeout, or the client has disconnected


def encode_request(own_lines: bytes, lines: list[bytes], length_line: bytes, body: bytes) -> bytes:
    """The bytes of a request. `lines`: the request line and header lines, in parts; the list is
    modified. `own_lines`: the pool's own lines. `length_line`: of `length_lines`; the body is
    framed by it, however the client framed it."""
    lines += own_lines, length_line, body
    return b"".join(lines)


def start_waiting(io: AttemptIO, exchange: Exchange, secs: float) -> None:
    """Record the time of sending. `secs`: the timeout for the head of its response."""
    loop = io.loop
    clock = loop.clock
    exchange.sent_at = now = loop.now
    # The time since the start of the iteration was spent in the proxy.
    exchange.own_secs += clock() - now
    # inlined: IoTask.set_timeout
    io.phase = "wait"
    due = now + secs
    io.phase_deadline = due if due < io.deadline else io.deadline  # noqa: FURB136


def read_complete_response(
    pool: UpstreamPool, chunk: bytes, heads: ResponseHeadCache, fleet: Fleet
) -> bytes | None:
    """The body of a complete response whose head is like the worker's last one; None for any
    other."""
    template = pool.response_template
    head, _, body = chunk.partition(_BLANK)
    if pool.asks_for_load:
        head = take_load(fleet, pool, head)
    size = len(body)
    digits = LENGTHS[size][0] if size < CACHED_LENGTHS else length_lines(size)[0]
    if head == template.start + digits + template.end:
        return body or None
    cached = heads.find(head)
    if cached.plain:
        pool.response_template = cached  # for the next one
    return None


async def run_attempt(
    io: AttemptIO,
    exchange: Exchange,
    head: RequestHead,
    pool: UpstreamPool,
    sent: SentRequest | None = None,
) -> ResponseStart:
    """Dial, send `head` and `exchange.body`, and wait for the response's head. `sent`: a request
    that was already sent, whose response is awaited. Raises AttemptFailed."""
    may_redial = io.connections != "new"
    while True:
        stream = sent.stream if sent else _idle_stream(io, pool, may_redial=may_redial)
        reused = stream is not None
        if stream is None:
            before = io.loop.now
            stream = await _dial(io, pool)
            exchange.connect_secs = io.loop.now - before
        io.upstream = stream
        try:
            if sent is None:
                return await _send(io, exchange, head, pool, stream)
            resumed, sent = sent, None
            return await _resume(io, head, resumed)
        except _ConnectionBroken as error:
            io.close_upstream()
            is_stale = reused and error.silent and may_redial
            if is_stale and io.connections == "redialled":
                may_redial = False
                continue
            kind = STALE_CONNECTION if is_stale else "reset_before_response"
            raise AttemptFailed(kind, f"RemoteProtocolError: {error}") from None
        except UpstreamProtocolError as error:
            io.close_upstream()
            raise AttemptFailed("bad_response", f"RemoteProtocolError: {error}") from None
        except HttpError:  # raised by the rest of the request body
            io.close_upstream()
            raise
        except PhaseTimeout as error:
            io.close_upstream()
            if io.phase == "body":  # the client was too slow
                raise
            message = f"ReadTimeout: no response head in time (phase {error})"
            raise AttemptFailed("response_timeout", message, 504) from None


def _resume(
    io: AttemptIO, head: RequestHead, sent: SentRequest
) -> Coroutine[Any, Any, ResponseStart]:
    if sent.error is not None:
        raise sent.error
    return _response_start(io, head, sent)


def _idle_stream(io: AttemptIO, pool: UpstreamPool, *, may_redial: bool) -> Stream | None:
    """An idle connection, if one may be used.

    None if the body is streamed, because it could not be sent again. None after a dead connection:
    a worker that restarts closes all of them, but not all closes have been reported yet.
    """
    return pool.reuse(io) if may_redial and io.body_stream is None else None


async def _dial(io: AttemptIO, pool: UpstreamPool) -> Stream:
    io.set_timeout("dial", io.settings.timeouts.connect)
    try:
        return await pool.dial(io)
    except OSError as error:
        if is_resource_exhaustion(error):
            raise _no_descriptors(error) from None
        raise AttemptFailed("connect_failure", f"ConnectError: {error.strerror or error}") from None
    except PhaseTimeout:
        raise AttemptFailed("connect_failure", "ConnectTimeout: no connection in time") from None


def _no_descriptors(error: OSError) -> HttpError:
    """The proxy ran out of descriptors, so this is not reported as a failure of the worker."""
    message = f"router overloaded: no connection to a worker can be opened: {error.strerror}"
    return HttpError(
        503, message, 503, type="overloaded_error", reason="descriptors"
    ).with_headers(("retry-after", "1"))  # fmt: skip


async def _send(
    io: AttemptIO, exchange: Exchange, head: RequestHead, pool: UpstreamPool, stream: Stream
) -> ResponseStart:
    secs = inf if pool.is_admin else io.response_head_secs
    body_stream = io.body_stream
    exchange.sent_at = io.loop.now
    request = _encode(exchange, head, pool, body_stream)
    start_waiting(io, exchange, secs)
    if body_stream is None and len(request) == 1:
        stream.write_soon(bytes(request[0]))
        return await _response_start(io, head, SentRequest(pool, stream))
    all_sent = await _send_large(io, stream, request)
    io.set_timeout("wait", secs)
    rest = body_stream if all_sent else None
    start = await _response_start(io, head, SentRequest(pool, stream), rest)
    start.all_sent &= all_sent
    return start


def _encode(
    exchange: Exchange, head: RequestHead, pool: UpstreamPool, body_stream: StreamedBody | None
) -> _Parts:
    worker, lines, body = pool.worker, head.lines, exchange.body
    own_lines = own_lines_of(pool, head)
    if exchange.rank is not None:
        lines = lines_for_rank(exchange, head)
    if exchange.trace is not None:
        lines = exchange.trace.lines_for_attempt(lines, exchange.sent_to, exchange.sent_at)
    if worker is not None and worker.api_key_env:
        lines = lines_with_own_key(worker, lines)
    if body_stream is not None:
        return [body_stream.start_stream(lines + own_lines)]
    if not (body or head.length or head.method in (b"POST", b"PUT", b"PATCH")):
        return [lines + own_lines + b"\r\n"]
    parts = changed_parts(exchange)
    if parts is not None:
        size = sum(map(len, parts))
        if size >= JOIN_BYTES:
            return [encode_request(own_lines, [lines], length_lines(size)[1], b""), *parts]
        body = b"".join(parts)
    if len(body) < JOIN_BYTES:
        return [encode_request(own_lines, [lines], length_lines(len(body))[1], body)]
    return [encode_request(own_lines, [lines], length_lines(len(body))[1], b""), body]


def changed_parts(exchange: Exchange) -> list[bytes | memoryview] | None:
    """The body for the current attempt, in parts that refer to the client's body; None if it is
    unchanged. An alias with `rewrite` changes the model, and a rank adds the key that names it if
    the engine ignores the header."""
    need, route, body, rank = (
        exchange.requirements, exchange.route, exchange.body, exchange.rank
    )  # fmt: skip
    if need is None or route is None or not body or exchange.legs is not None:
        return None  # in two legs `dataplane.disaggregation.two_leg_request` changes it
    parts = None
    if need.alias is not None and need.alias.spans:
        parts = parts_for_target(need, route, body)
    if rank is None:
        return parts
    return body_for_rank(route.path, need, rank, body if parts is None else b"".join(parts))


def lines_for_rank(exchange: Exchange, head: RequestHead) -> bytes:
    """The head's lines. If the attempt has a rank, the client's rank header is dropped, because the
    pool adds its own."""
    if exchange.rank is None or RANK_HINT not in head.hints:
        return head.lines
    return drop_fields(head.lines, RANK_FIELD)


async def _response_start(
    io: AttemptIO,
    head: RequestHead,
    sent: SentRequest,
    body_stream: StreamedBody | None = None,
) -> ResponseStart:
    """Wait for the head of the response, and send `body_stream` until it arrives."""
    stream, buffer, interim = sent.stream, b"", 0
    chunk: bytes | None = sent.received or None
    while True:
        if chunk is None:
            if body_stream is not None and not stream.has_input():
                body_stream = None if await _stream_body(io, body_stream, stream) else body_stream
            if io.must_wait_for(stream):
                if io.keepalive is None:
                    await pause
                else:
                    await io.keepalive.for_head(stream)
            try:
                chunk = stream.read(READ_BYTES)
            except OSError as error:
                raise _ConnectionBroken(error.strerror or "reset", silent=not buffer) from None
            if chunk is None:
                continue
        if not chunk:
            raise _ConnectionBroken("the worker closed without a response", silent=not buffer)
        received, chunk = buffer + chunk, None
        parsed = _parse_start(io, head, sent, received)
        if isinstance(parsed, ResponseStart):
            parsed.all_sent = body_stream is None and not stream.pending
            return parsed
        interim += received.count(_BLANK, 0, len(received) - len(parsed))
        check_interim(interim)
        buffer = parsed


async def _stream_body(io: AttemptIO, body_stream: StreamedBody, stream: Stream) -> bool:
    """False if the worker responded before the end of the body, or the connection broke."""
    all_sent = await body_stream.stream_to(stream)
    io.set_timeout("wait", io.response_head_secs)
    return all_sent


def _parse_start(
    io: AttemptIO, head: RequestHead, sent: SentRequest, received: bytes
) -> ResponseStart | bytes:
    """The final response in `received`, or the rest of `received` after interim responses."""
    interim = 0
    response_heads = io.services.response_heads
    while end := find_response_head_end(received):
        top = received[:end]
        if sent.pool.asks_for_load:
            top = read_load(io.services.fleet, sent.pool, top, head)
        response = response_heads.read(top, to_head=head.method == b"HEAD")
        received = received[end:]
        if response.status >= 200:
            bodiless = response.is_complete
            if bodiless:
                response.excess = bool(received)  # not relayed: it could be taken for a response
                received = b""
            elif received:
                received = response.feed(received)
            return ResponseStart(sent.pool, sent.stream, response, received, bodiless)
        if response.status == 101:
            raise UpstreamProtocolError("an upgrade that was not requested")
        interim += 1
        check_interim(interim)
    return received


async def _send_large(io: AttemptIO, stream: Stream, request: _Parts) -> bool:
    """Send a request that is too large to be joined. Returns whether all of it was sent."""
    try:
        sent = stream.sendmsg(request)
    except BlockingIOError:
        sent = 0
    except OSError:
        stream.readable = True  # its response, or its end, is waiting to be read
        return False
    secs = io.phase_deadline - io.loop.now
    for part in request:  # separately, because joining them would copy the body
        if sent < len(part) and not await _send_part(io, stream, memoryview(part)[sent:], secs):
            return False
        sent = max(0, sent - len(part))
    return True


async def _send_part(io: AttemptIO, stream: Stream, view: memoryview, secs: float) -> bool:
    """False if the worker responded (e.g. 413) or the connection broke before all was sent."""
    io.set_timeout("send", secs)
    while not stream.has_input():
        try:
            view = view[stream.send(view) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        if not view:
            return True
        io.waiting_on = stream  # its buffer is full, so epoll will report when it is writable
        await pause
        io.set_timeout("send", secs)
    return False
