"""The fast path: an exchange that waits only for the worker, run by the event loop itself.

Nearly every request arrives complete, in one read, with a head like the previous one; a worker with
an idle connection takes it immediately, and its response also arrives complete. Then the steps are
called directly here, while the connection's coroutine waits for the next head. The Exchange is the
same as the coroutine would create: at the first step that has to wait, fails or differs, the
coroutine continues with it (`continuation`). Contract: nothing is rejected, retried, dialled or
reported to outlier ejection here.
"""

from __future__ import annotations

from random import getrandbits
from typing import Final

import msgspec

from omni_proxy.dataplane.admission.caller_admission import (
    NOT_COUNTED,
    begin_complete_call,
    cancel_call,
    end_complete_call,
)
from omni_proxy.dataplane.attempt.attempt import (
    CACHED_LENGTHS,
    LENGTHS,
    SentRequest,
    encode_request,
    length_lines,
    read_complete_response,
    start_waiting,
)
from omni_proxy.dataplane.drivers.exchange_steps import (
    Response,
    respond_by_worker,
    set_requirements,
)
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.fast_path_cache import CachedRequest
from omni_proxy.dataplane.exchange.request_id import id_from_body
from omni_proxy.dataplane.exchange.request_trace import (
    DRAW_BITS,
    UNSAMPLED,
    UNSAMPLED_LINE,
    Tracing,
    trace_parts,
)
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.finalize import finalize
from omni_proxy.dataplane.loop.stream import READ_BYTES, Stream
from omni_proxy.dataplane.loop.task import EventHandler, PhaseTimeout
from omni_proxy.dataplane.relay.response_relay import diagnostic_fields
from omni_proxy.dataplane.upstream.pool import UpstreamPool
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.plain_body import read_plain_body
from omni_proxy.routing.inspect.requirements import Requirements, requirements_of_fields
from omni_proxy.routing.model_aliases import parts_for_target, set_alias
from omni_proxy.routing.pinning import body_for_rank
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.upstream_http.credentials import lines_with_own_key
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead

_BLANK: Final = b"\r\n\r\n"
_BRACE: Final = b"{"  # of a JSON object: to search for it is faster than for the blank line
# Errors that the coroutine handles. Cython compiles no `*` in an `except` clause.
_REFUSALS: Final = (HttpError, *MALFORMED)


class FastPath(EventHandler):
    """Handles the events of a connection's streams from `start` to `stop`. `waiting_on` is the one
    stream whose event it handles next, never ANY_STREAM."""

    __slots__ = ("_io", "_pool", "_received", "_request", "_spare", "cached", "error")

    client: Stream

    def __init__(self, io: ExchangeIO, cached: CachedRequest) -> None:
        super().__init__()
        self.client = io.client
        self.cached = cached
        self.error: BaseException | None = None  # an exception to pass to the coroutine
        self._io = io
        self._pool: UpstreamPool | None = None  # of the upstream that has the request
        self._spare: Exchange | None = None  # of the last request, for reuse
        self._request = b""  # as it was read
        self._received = b""  # bytes of a response that the coroutine must relay

    def start(self) -> None:
        self.client.task = self
        self.waiting_on = self.client

    def stop(self) -> None:
        """Pass the events of all streams to the connection's coroutine again, with the exchange
        that has begun, if any."""
        io = self._io
        if io.exchange is not None:
            io.exchange.reset_result()
        self.client.task = io
        if io.upstream is not None:
            io.upstream.task = io

    def step(self, error: BaseException | None = None) -> None:
        """Handle an event of the awaited stream; never called with an error, see `throw`."""
        io = self._io
        exchange = io.exchange
        stream: Stream = self.waiting_on  # type: ignore[assignment]
        try:
            try:
                chunk = stream.read(READ_BYTES)
            except OSError:
                chunk = b""  # the coroutine's next read raises the error
            if chunk is None:
                self._wait_on(stream)
            elif exchange is None:
                if stream.readable or not self._send(chunk):
                    io.unread = chunk if io.exchange is None else b""
                    io.step()
            elif stream.readable or not self._relay(exchange, stream, chunk):
                self._received = chunk
                io.step()
        except Exception as failure:  # a bug ends only this connection
            io.step(failure)

    def throw(self, error: BaseException) -> None:
        self._io.throw(error)

    def is_disconnect(self, mask: int) -> bool:
        return self._io.is_disconnect(mask)

    def can_continue_after(self, error: BaseException) -> bool:
        """Whether the coroutine continues the exchange, and handles the error in it."""
        return isinstance(error, PhaseTimeout)

    def continuation(self, exchange: Exchange) -> Response:
        """A coroutine for the rest of an exchange that was begun here."""
        return respond_by_worker(self._io, exchange, self._head(exchange), self._sent())

    def _head(self, exchange: Exchange) -> RequestHead:
        """The whole head of the request. Also sets the body of `exchange`."""
        lines, body, _ = self._match_at_blank_line(self._request)
        assert lines is not None
        head = msgspec.structs.replace(
            self.cached.head,
            lines=b"".join(lines),
            length=len(body),
            request_id=exchange.request_id,
        )
        exchange.body = body
        if exchange.trace is None and self.cached.tracing is not None:
            exchange.trace = UNSAMPLED  # for further attempts
        return head

    def _match_at_blank_line(self, request: bytes) -> tuple[list[bytes] | None, bytes, bytes]:
        """The lines to forward, None if the head does not match; the body and its length line."""
        head, blank, body = request.partition(_BLANK)
        digits, length_line = length_lines(len(body))
        return self.cached.template.match(head + blank, digits), body, length_line

    def _sent(self) -> SentRequest | None:
        """The request that was sent to the worker; None if nothing was sent."""
        sent = None
        if self._pool is not None and self._io.upstream is not None:
            sent = SentRequest(self._pool, self._io.upstream, self._received, self.error)
        self.error = None
        self._request = self._received = b""
        return sent

    def _wait_on(self, stream: Stream) -> None:
        """Wait for the stream, which had nothing to read."""
        self.waiting_on = stream
        # The event may mean that pending bytes were sent; a draining proxy then closes it.
        drains = self._io.services.inflight.closes_idle and self._io.exchange is None
        if stream.readable or drains:
            self._io.step()

    def _new_exchange(self) -> Exchange:
        head = self.cached.head
        exchange = Exchange(self._io.loop.now, self._io.peer)
        exchange.method, exchange.target, _ = head.log_words
        exchange.route = self.cached.route
        exchange.idempotency_key = head.idempotency_key
        exchange.caller = self.cached.caller
        return exchange

    def _send(self, chunk: bytes) -> bool:  # noqa: C901 - one frame, as it runs for each request
        """Send the request. False: the coroutine continues, with `io.exchange` if it has begun."""
        cached, io = self.cached, self._io
        template, services = cached.template, io.services
        brace = chunk.find(_BRACE)
        size = len(body := chunk[brace:])
        digits, length_line = LENGTHS[size] if size < CACHED_LENGTHS else length_lines(size)
        lines = template.match(chunk[:brace], digits)
        if lines is None:  # a brace in the head, white space before the body, or another head
            lines, body, length_line = self._match_at_blank_line(chunk)
        if lines is None or cached.source is not io.settings.fast_path_cache:
            return False
        try:
            plain = read_plain_body(cached.route, body) if cached.reads_plain_body else None
            decode = cached.decode_ascii if body.isascii() else cached.decode
            undecoded = body if cached.decodes_later else b""
            need = plain or requirements_of_fields(cached.route, decode(body), undecoded)
            balancer = services.balancer
            if balancer.aliases is not None and need.model in balancer.aliases.splits:
                set_alias(balancer.aliases, need, cached.route, body, cached.head)
            exchange = self._spare or self._new_exchange()
            exchange.recycle(io.loop.now)
            exchange.bytes_in, exchange.policy = len(body), balancer.policy.name
            if (caller := cached.caller) is not None:
                if caller.begun < caller.fast_path_bound and exchange.started_at < caller.until:
                    caller.begun += 1  # inlined: begin_complete_call
                    exchange.reserved = 0
                elif not begin_complete_call(exchange, caller, need, body):
                    return False
            if not services.inflight.admit(exchange, len(chunk)):
                cancel_call(exchange, io.loop.now)
                return False
            io.exchange, self._spare, self._request = exchange, None, chunk
            head_id = lines[template.id_index] if template.id_index > 0 else cached.head.request_id
            exchange.request_id = head_id or id_from_body(need)
            is_special = set_requirements(io, exchange, need, lines, body)
            if cached.tracing is not None:
                self._begin_trace(exchange, lines, cached.tracing)
            target = worker = balancer.acquire(exchange)
            if is_special or exchange.rank is not None:
                if exchange.legs is not None:
                    return self._send_legs(exchange, lines, body)
                body, target = self._body_for(exchange, need, body), exchange.rank or worker
                length_line = length_lines(len(body))[1]
        except _REFUSALS:
            return False
        pool = services.upstream_pools.known.get(target) or services.upstream_pools.of(target)
        if not (idle := pool.idle):  # inlined: UpstreamPool.reuse
            return False
        io.upstream = self.waiting_on = upstream = idle.pop()
        upstream.task, self._pool = self, pool
        if worker.api_key_env or exchange.trace is not None:
            lines = self._lines_for(exchange, target, lines)
        upstream.pending = encode_request(pool.own_lines, lines, length_line, body)
        start_waiting(io, exchange, io.settings.timeouts.response_head)
        io.loop.pending_writers.append(upstream)  # inlined: Stream.write_soon
        return not upstream.readable

    def _begin_trace(self, exchange: Exchange, lines: list[bytes], tracing: Tracing) -> None:
        """Begin the trace of the request; an unsampled one only adds a line to the head."""
        if (draw := getrandbits(DRAW_BITS)) >= self.cached.sampled_below:
            exchange.trace = None
            lines.append(UNSAMPLED_LINE % draw)
        else:
            exchange.trace = tracing.begin_from_parts(lines, self.cached.trace_index)

    def _lines_for(self, exchange: Exchange, target: Worker, lines: list[bytes]) -> list[bytes]:
        """Add the trace's context and the worker's own key to the head."""
        trace = exchange.trace  # sampled, or None
        if trace is not None:
            trace_parts(trace, lines, self.cached.trace_index, target, self._io.loop.now)
        return [lines_with_own_key(target.worker, b"".join(lines))]

    def _body_for(self, exchange: Exchange, need: Requirements, body: bytes) -> bytes:
        """The body with the model of an alias's target, and the key that names a rank. Raises
        HttpError."""
        route = self.cached.route
        if need.alias is not None and need.alias.spans:
            body = b"".join(parts_for_target(need, route, body))
        if exchange.rank is not None:
            body = b"".join(body_for_rank(route.path, need, exchange.rank, body))
        return body

    def _send_legs(self, exchange: Exchange, lines: list[bytes], body: bytes) -> bool:
        """As `_send`, for a request in two legs."""
        return False

    def _relay(
        self, exchange: Exchange, upstream: Stream, chunk: bytes, sent_at_once: bool = True
    ) -> bool:
        """Relay a response whose head is like the last one, and end the exchange. False if the
        coroutine must do so. `sent_at_once`: the request was sent when it arrived."""
        io, client, worker, pool = self._io, self.client, exchange.worker, self._pool
        assert worker is not None
        assert pool is not None
        services = io.services
        body = read_complete_response(pool, chunk, services.response_heads, services.fleet)
        if (
            body is None
            or upstream.pending
            or client.pending
            or io.close_after_response
            or exchange.half_open_id
            or worker.weight_version is not exchange.weight_version
            or worker.health.failed_requests
        ):
            return False
        template, size = pool.response_template, len(body)
        length_line = LENGTHS[size][1] if size < CACHED_LENGTHS else length_lines(size)[1]
        exchange.response_head_at = exchange.first_at = io.loop.now
        client.pending = b"".join([
            template.lines, *diagnostic_fields(exchange), exchange.weight_version.lines,
            length_line, body,
        ])  # fmt: skip
        io.loop.pending_writers.append(client)  # inlined: Stream.write_soon
        # inlined: Exchange.end
        exchange.status, exchange.chunks, exchange.bytes_out = template.status, 1, size
        exchange.relayed, exchange.single_chunk, exchange.outcome = True, sent_at_once, "completed"
        need = exchange.requirements
        assert need is not None
        has_extras = (
            io.settings.counts_usage or need.prediction is not None or exchange.trace is not None
        )
        if has_extras:
            exchange.last_chunk = body
        if (caller := exchange.caller) is not None:
            if caller.defers_counts:
                caller.uncounted.append((body, exchange.bytes_in, exchange.status))
                exchange.reserved = NOT_COUNTED
            else:
                end_complete_call(exchange, caller, body)
                has_extras = has_extras or exchange.reserved != NOT_COUNTED
        self._pool, self._request = None, b""
        self.waiting_on = client
        io.exchange = None
        try:
            pool.release(upstream)
            io.upstream = None
        finally:
            finalize(services, exchange, "relay", has_extras or exchange.legs is not None)
        exchange.requirements = exchange.last_worker = exchange.last_rank = None  # free them now
        exchange.last_chunk = b""
        self._spare = exchange
        io.await_next_request()
        if client.readable:  # more bytes, or the client's close
            io.step()
        return True
