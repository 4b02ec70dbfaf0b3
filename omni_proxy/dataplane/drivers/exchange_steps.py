"""The steps of an exchange in a coroutine: route, admit, inspect, try workers, relay.

Invariant: an attempt is retried only while no byte of a response was sent to the client. Every
worker acquired is released, on every path. Outlier ejection gets transport errors, timeouts before
the head, broken bodies, 502 and 504, and 500 if that is retried; never a disconnect of the client.
"""

from __future__ import annotations

import socket
from collections.abc import Coroutine, Generator, Sequence
from math import inf
from typing import Any, TypeVar
from urllib.parse import unquote

from omni_proxy.admin_ops.admin_route_table import is_known
from omni_proxy.config.schema import Config
from omni_proxy.dataplane import websocket_relay
from omni_proxy.dataplane.admission.caller_admission import begin_call, check_models_form, reserve
from omni_proxy.dataplane.attempt.attempt import AttemptFailed, SentRequest, run_attempt
from omni_proxy.dataplane.attempt.outlier_reports import report_end, report_failure
from omni_proxy.dataplane.attempt.retry import RetryState
from omni_proxy.dataplane.disaggregation.two_leg_request import respond_in_two_legs
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.request_id import add_forwarded, id_from_body, new_request_id
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.task import pause
from omni_proxy.dataplane.relay.local_reply import (
    check_websocket_origin,
    is_preflight,
    linger,
    reply_to_preflight,
)
from omni_proxy.dataplane.relay.request_body import RequestBody
from omni_proxy.dataplane.relay.response_relay import relay
from omni_proxy.dataplane.relay.sse_keepalive import SseKeepAlive
from omni_proxy.dataplane.relay.stored_responses import creates_stored_response, watch_response
from omni_proxy.dataplane.upstream.fleet_requirements import (
    RequestParts,
    complete_requirements,
    pin_request,
    requirements_of_beginning,
)
from omni_proxy.routing.inspect.large_json import LARGE_BYTES, ONE_PASS_BYTES, walk_large_json
from omni_proxy.routing.inspect.model_field import walk_model_spans
from omni_proxy.routing.inspect.requirements import (
    Requirements,
    has_json_body,
    inspect_request,
    requirements_of_large_json,
)
from omni_proxy.routing.model_aliases import set_alias
from omni_proxy.routing.routes import MethodNotAllowed, find_route
from omni_proxy.routing.weighted_split import AliasRequirement, Split
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.forwarded import with_received
from omni_proxy.wire.proxy_protocol import peer_field
from omni_proxy.wire.request import RequestHead, hint_lines

Response = Coroutine[Any, Any, bool]
Found = TypeVar("Found")


def respond(io: ExchangeIO, exchange: Exchange, head: RequestHead) -> Response:
    """The coroutine that responds to the request; its result is whether the connection continues.

    This function raises HttpError; the coroutine also PhaseTimeout and ClientDisconnected.
    Functions here return coroutines rather than await them, because every event resumes each frame
    on the stack.
    """
    exchange.head_at = io.loop.now
    exchange.method, exchange.target, path = head.log_words
    settings = io.settings
    if settings.forwarded is not None:
        exchange.request_id = head.request_id  # also for local replies
    if io.role.admin_only or not io.role.relays:
        return _respond_by_admin_api(io, exchange, head)
    if head.origin:
        exchange.cors = settings.cors.lines(head.origin)
    try:
        route = find_route(settings.routes, exchange.method, path)
    except MethodNotAllowed as error:
        if is_preflight(head) and settings.cors:
            return reply_to_preflight(io, exchange, head, error.allowed)
        raise error.as_http_error(close=bool(head.length)) from None
    if route is None:
        exchange.cors = b""  # admin routes have their own CORS rules
        return _respond_by_admin_api(io, exchange, head)
    exchange.route = route
    exchange.idempotency_key = head.idempotency_key
    tracing = settings.tracing
    exchange.trace = tracing.begin_from_head(head.lines) if tracing is not None else None
    if settings.callers.guarded:
        begin_call(settings, exchange, head, io.loop.now)
    if route.websocket:
        check_websocket_origin(io, head)
        return websocket_relay.session(io, exchange, head)  # admits after the handshake
    if not io.services.inflight.admit(exchange):
        return _wait_for_slot(io, exchange, head)
    return _admitted(io, exchange, head)


async def _wait_for_slot(io: ExchangeIO, exchange: Exchange, head: RequestHead) -> bool:
    inflight = io.services.inflight
    inflight.hold(exchange, io.head_bytes + len(io.unread))
    await io.services.queue.wait_for_slot(io, exchange, unread=bool(head.length))
    inflight.release_bytes(exchange)
    return await _admitted(io, exchange, head)


def _admitted(io: ExchangeIO, exchange: Exchange, head: RequestHead) -> Response:
    body = io.take_received_body(exchange, head.length, io.settings.limits.max_body)
    if body is None:
        return _read_body(io, exchange, head)
    io.services.inflight.hold(exchange, io.head_bytes + len(body))
    exchange.body = body
    return _inspected(io, exchange, head)


async def _read_body(io: ExchangeIO, exchange: Exchange, head: RequestHead) -> bool:
    """Read the body until it is complete, or until its worker can be chosen; then stream it."""
    body = await _start_body(io, exchange, head, io.settings.limits.max_body)
    may_stream = head.length > LARGE_BYTES or not await body.hold(LARGE_BYTES)
    need = _streamable(io, exchange, head, body) if may_stream else None
    if need is None and may_stream and not await body.hold(LARGE_BYTES):
        need = _streamable(io, exchange, head, body)
    if need is not None:
        return await _stream(io, exchange, head, need)
    await body.hold_all()
    need = await _walk(io, exchange, head, body) if body.held_bytes > ONE_PASS_BYTES else None
    exchange.body = body.take()
    return await _inspected(io, exchange, head, need)


async def _start_body(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, limit: int
) -> RequestBody:
    if head.expects_continue and not io.unread:
        io.set_timeout("body", io.settings.timeouts.client_body)
        await io.write(io.client, b"HTTP/1.1 100 Continue\r\n\r\n")
    return RequestBody(io, exchange, head, limit)


async def _walk(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, body: RequestBody
) -> Requirements | None:
    """The requirements of a body that is too large to be parsed in one iteration; None if it is not
    JSON."""
    route = exchange.route
    assert route is not None
    if not has_json_body(route, head):
        return None
    io.set_timeout(io.phase, inf)  # the whole body has arrived
    fields = await _in_slices(io, walk_large_json(body.buffered_body()))
    need = requirements_of_large_json(route, fields, head)
    split = _rewriting_split(io, need)
    if split is not None:
        spans = await _in_slices(io, walk_model_spans(body.buffered_body()))
        need.alias = AliasRequirement(split, spans=spans)
    return need


async def _in_slices(io: ExchangeIO, walk: Generator[None, None, Found]) -> Found:
    """The result of the walk; yields to other connections between two slices."""
    while True:
        try:
            next(walk)
        except StopIteration as stop:
            result: Found = stop.value
            return result
        io.loop.wake(io)
        await pause


def _streamable(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, body: RequestBody
) -> Requirements | None:
    """The requirements of a large body, if they are known before all of it has arrived."""
    assert exchange.route is not None
    if body.is_complete or (io.services.fleet.has_pools and exchange.route.legs.connectors):
        return None  # in two legs the body is sent twice, with keys added by the proxy
    if exchange.caller is not None and exchange.caller.models:
        return None  # the model in the body decides whether the request is allowed
    io.body_stream = body  # after an error from here on, the rest of it is unread
    need = requirements_of_beginning(io.services.fleet, exchange.route, body.beginning, head)
    if need is not None and _rewriting_split(io, need) is not None:
        need = None  # the model to rewrite may be in the part that has not arrived
    if need is None:
        io.body_stream = None
    return need


def _rewriting_split(io: ExchangeIO, need: Requirements) -> Split | None:
    """The split of the alias that the request names, if that rewrites the model."""
    aliases = io.services.balancer.aliases
    split = aliases.find(need.model) if aliases is not None else None
    return split if split is not None and split.rewrite else None


async def _stream(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, need: Requirements
) -> bool:
    """Stream the body. If the response arrives before its end, relay it and close the
    connection."""
    keep = await _inspected(io, exchange, head, need)
    body, io.body_stream = io.body_stream, None
    if body is not None and not body.is_complete and not io.client.closed:
        await linger(io)
        return False
    return keep


def _inspected(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, requirements: Requirements | None = None
) -> Response:
    route, services = exchange.route, io.services
    assert route is not None
    need = requirements or inspect_request(route, exchange.body, head)
    parts = RequestParts(route, (head.lines,), exchange.body, head.log_words[2], head.hints)
    pin_request(services.balancer, services.fleet, need, parts, io.loop.now)
    if creates_stored_response(route):
        watch_response(io, exchange)
    exchange.request_id = head.request_id or id_from_body(need)
    if exchange.caller is not None:
        size = max(len(exchange.body), head.length)
        check_models_form(exchange, head)
        reserve(exchange, need, services.fleet, size, io.loop.now)
    if services.balancer.aliases is not None:
        set_alias(services.balancer.aliases, need, route, exchange.body, head)
    set_requirements(io, exchange, need, (head.lines,), exchange.body)
    if io.settings.forwarded is not None:
        add_forwarded(io.settings.forwarded, exchange, head)
    io.check_client(half_close_aborts=io.settings.half_close_aborts)
    if need.stream and io.settings.timeouts.sse_keepalive:
        io.keepalive = SseKeepAlive(io, exchange, head)
    return respond_by_worker(io, exchange, head)


def set_requirements(
    io: ExchangeIO,
    exchange: Exchange,
    need: Requirements,
    lines: Sequence[bytes],
    body: bytes,
) -> bool:
    """Set the requirements of the exchange. From here on `request_timeout_secs` bounds it, unless
    its response is a stream. `lines`: the head, in parts. Returns whether the request may have an
    alias or two legs."""
    exchange.requirements = need
    exchange.stream = need.stream
    balancer = io.services.balancer
    is_special = False
    if balancer.always_special or need.alias is not None:
        is_special = _set_special(io, exchange, need, lines, body)
    if not need.stream:
        io.deadline = io.loop.now + io.settings.timeouts.total
    return is_special


def _set_special(
    io: ExchangeIO,
    exchange: Exchange,
    need: Requirements,
    lines: Sequence[bytes],
    body: bytes,
) -> bool:
    """Complete `need` for fleets with roles, adapters or aliases, and for policies that need an
    affinity key. Returns whether the request may have an alias or two legs."""
    balancer, fleet, route = io.services.balancer, io.services.fleet, exchange.route
    assert route is not None
    complete_requirements(balancer, fleet, need, RequestParts(route, lines, body))
    return fleet.has_pools or need.alias is not None


async def respond_by_worker(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, sent: SentRequest | None = None
) -> bool:
    """Try workers until one responds, and relay its response. `sent`: the request, if it was
    already sent to the first one. Raises HttpError if none responded."""
    services, need = io.services, exchange.requirements
    assert need is not None
    exchange.policy = exchange.policy or services.balancer.policy.name
    retry: RetryState | None = None
    try:
        worker = exchange.worker or services.balancer.acquire(exchange)
    except HttpError as error:
        worker = await services.queue.wait_for_worker(io, exchange, error)
    while True:
        if exchange.legs is not None:
            return await respond_in_two_legs(io, exchange, head, respond_by_worker)
        pool = (
            sent.pool if sent is not None else services.upstream_pools.of(exchange.rank or worker)
        )
        try:
            start = await run_attempt(io, exchange, head, pool, sent)
        except AttemptFailed as error:
            report_failure(services.fleet, exchange, worker, error.error)
            message = f"upstream request failed: {error.error}"
            client_error = HttpError(error.status, message, error.kind)
            retry = retry or RetryState(io, exchange, len(exchange.body))
            sent = None
            worker = await retry.next_worker(error.kind, client_error)
            continue
        if start.response.status < 400:
            break
        retry = retry or RetryState(io, exchange, len(exchange.body))
        another = await retry.worker_after_response(start)
        if another is None:
            break
        sent, worker = None, another
    io.services.inflight.release_body(exchange)
    keep = await relay(io, exchange, head, start)
    report_end(io.services, exchange, worker)
    return keep


async def _respond_by_admin_api(io: ExchangeIO, exchange: Exchange, head: RequestHead) -> bool:
    """Relay to the admin API: as for a worker, but without policy, health and diagnostics."""
    settings, pools = io.settings, io.services.upstream_pools
    limit = settings.config.admin.max_body_bytes
    body = io.take_received_body(exchange, head.length, limit)
    if body is None:
        if head.expects_continue and not io.role.admin_only:
            _check_admin_path(head, settings.config)
        request_body = await _start_body(io, exchange, head, limit)
        await request_body.hold_all()
        body = request_body.take()
        del request_body
    elif body:
        io.services.inflight.hold(exchange, len(body))
    exchange.body = body
    del body
    if settings.forwarded is not None:
        exchange.request_id = head.request_id or new_request_id()
        add_forwarded(settings.forwarded, exchange, head)
    head.lines = _admin_lines(io, head)
    io.loop.admin_exchanges += 1
    counted = True
    try:
        pool = pools.admin_listener if io.role.admin_only else pools.admin_api
        if io.role.metrics_only:
            pool = pools.metrics_listener
        start = await run_attempt(io, exchange, head, pool)
        io.services.inflight.release_body(exchange)
        if start.response.sse:  # at an event per second, the loop may wait in its own epoll
            io.loop.admin_exchanges -= 1
            counted = False
        return await relay(io, exchange, head, start)
    except AttemptFailed as error:
        raise HttpError(
            503, f"the admin API is not responding: {error.error}", "front_unavailable",
            reason="admin_api_unavailable",
        ) from None  # fmt: skip
    finally:
        io.loop.admin_exchanges -= counted


def _admin_lines(io: ExchangeIO, head: RequestHead) -> bytes:
    client = io.client
    lines = head.lines + hint_lines(head.hints) + peer_field(io.peer)
    local = client.sock.family == socket.AF_UNIX
    return with_received(lines, head.host, secure=client.is_tls, local=local)


def _check_admin_path(head: RequestHead, config: Config) -> None:
    """Refuse an unknown path before a client with `Expect: 100-continue` sends its body (RFC 9110
    10.1.1). Raises HttpError 404, as the admin API would."""
    method, _, path = head.log_words
    if not is_known(unquote(path), config):
        raise HttpError(
            404, f"Not Found: {method} {path}", "not_found", close=True, detail="Not Found"
        )
