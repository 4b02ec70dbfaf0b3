"""One exchange from inspection to account: which upstream, how many tries, what a failure becomes.

Invariant: a try is repeated only while not one byte of an answer has left for the client. Every
worker taken is left again, on every path. Health hears of transport errors, timeouts before the
head, broken bodies, 502 and 504, and 500 where that is retried; never of a client that left.
"""

from __future__ import annotations

import socket
from collections.abc import Coroutine
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from omni_proxy.admin_ops.routes import is_known
from omni_proxy.dataplane.exchange.cors_preflight import (
    answer_preflight,
    is_preflight,
    refuse_foreign_socket,
)
from omni_proxy.dataplane.exchange.exchange import Exchange, id_for, new_id, report, stamp
from omni_proxy.dataplane.exchange.local_reply import linger
from omni_proxy.dataplane.exchange.request_body import RequestBody
from omni_proxy.dataplane.exchange.response_relay import relay
from omni_proxy.dataplane.exchange.sse_keepalive import SseKeepAlive
from omni_proxy.dataplane.loop.task import ClientDisconnected, pause
from omni_proxy.dataplane.upstream.acquire import take
from omni_proxy.dataplane.upstream.attempt import Asked, AttemptFailed, FastPathHandoff, ask
from omni_proxy.dataplane.upstream.pool import with_key
from omni_proxy.dataplane.upstream.retry import RetryState
from omni_proxy.dataplane.websocket import relay as websocket_relay
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.large_json import LARGE_BYTES, ONE_PASS_BYTES, walk_large_json
from omni_proxy.routing.inspect.large_json import settle_unread as settle_large
from omni_proxy.routing.inspect.requirements import (
    Requirements,
    affinity_key_of,
    has_json_body,
    inspect_request,
    requirements_of_beginning,
    requirements_of_large_json,
)
from omni_proxy.routing.routes import UNPINNED, VOICE_OWNER, MethodNotAllowed, match_route
from omni_proxy.routing.voices import pin_to_voice_owner
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.proxy_headers import with_received
from omni_proxy.wire.proxy_protocol import peer_field
from omni_proxy.wire.request import RequestHead, hint_lines

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection


def answer(conn: Connection, mine: Exchange, head: RequestHead) -> Coroutine[Any, Any, bool]:
    """What will answer it; its result says whether the connection may go on.

    Both this and that raise HttpError, that also Expired and ClientDisconnected. No coroutine itself: this frame
    would be resumed through at every event.
    """
    mine.head_at = conn.loop.now
    mine.method, mine.target, path = head.log_words
    if conn.door.stamps is not None:
        mine.request_id = head.request_id  # for a refusal, too
    if conn.admin_only:
        return _by_front(conn, mine, head)
    if head.origin:
        mine.cors = conn.door.cors.lines(head.origin)
    try:
        route = match_route(mine.method, path)
    except MethodNotAllowed as wrong:
        if is_preflight(head) and conn.door.cors:
            return answer_preflight(conn, mine, head, wrong.allowed)
        allowed = ", ".join(sorted(wrong.allowed))
        raise HttpError(
            405, f"this path takes {allowed}", "method_not_allowed",
            close=bool(head.length), detail="Method Not Allowed",
        ).with_headers(("allow", allowed)) from None  # fmt: skip
    if route is None:
        mine.cors = b""  # those routes have rules of their own
        return _by_front(conn, mine, head)
    mine.route = route
    mine.idempotency_key = head.idempotency_key
    if route.websocket:
        refuse_foreign_socket(conn, head)
        return websocket_relay.session(conn, mine, head)  # admits when it can say no in its own way
    door = conn.door
    if not door.count_in(mine):
        return _when_admitted(conn, mine, head)
    return _admitted(conn, mine, head)


def go_on(conn: Connection, begun: FastPathHandoff) -> Coroutine[Any, Any, bool]:
    """As `answer`, from where the short way has left it."""
    mine = begun.mine
    if not mine.stream:
        conn.deadline = mine.body_at + conn.door.limits.total
    return _by_worker(conn, mine, begun.head, begun.body, begun.asked)


async def _when_admitted(conn: Connection, mine: Exchange, head: RequestHead) -> bool:
    conn.hold(conn.head_bytes + len(conn.rest))
    await conn.door.queue.wait_for_slot(conn, mine, unread=bool(head.length))
    conn.let_go()
    return await _admitted(conn, mine, head)


def _admitted(conn: Connection, mine: Exchange, head: RequestHead) -> Coroutine[Any, Any, bool]:
    body = conn.body_at_hand(mine, head, conn.door.limits.max_body)
    if body is None:
        return _when_read(conn, mine, head)
    conn.hold(conn.head_bytes + len(body))
    return _inspected(conn, mine, head, body)


async def _when_read(conn: Connection, mine: Exchange, head: RequestHead) -> bool:
    upload = await _begun(conn, mine, head, conn.door.limits.max_body)
    may_stream = head.length > LARGE_BYTES or not await upload.hold(LARGE_BYTES)
    need = _known(conn, mine, head, upload) if may_stream else None
    if need is None and may_stream and not await upload.hold(LARGE_BYTES):
        need = _known(conn, mine, head, upload)
    if need is not None:
        return await _streamed(conn, mine, head, need)
    await upload.hold_all()
    need = await _walked(conn, mine, head, upload) if upload.held_bytes > ONE_PASS_BYTES else None
    # No name for the body: this frame lives as long as the answer, and would keep it.
    return await _inspected(conn, mine, head, upload.take(), need)


async def _walked(
    conn: Connection, mine: Exchange, head: RequestHead, upload: RequestBody
) -> Requirements | None:
    """What a body says that is too large to be read in one turn; None where it is no JSON."""
    route = mine.route
    assert route is not None
    if not has_json_body(route, head):
        return None
    conn.phase_deadline = conn.deadline  # all of it has come
    walk = walk_large_json(upload.held_whole())
    while True:
        try:
            next(walk)
        except StopIteration as found:
            return requirements_of_large_json(route, found.value, head)
        conn.loop.wake(conn)
        await pause


async def _begun(conn: Connection, mine: Exchange, head: RequestHead, limit: int) -> RequestBody:
    if head.expects_continue and not conn.rest:
        conn.clock("body", conn.door.limits.client_body)
        await conn.write(conn.client, b"HTTP/1.1 100 Continue\r\n\r\n")
    return RequestBody(conn, mine, head, limit)


def _known(
    conn: Connection, mine: Exchange, head: RequestHead, upload: RequestBody
) -> Requirements | None:
    """What a large body needs, where that can be told before it has come."""
    assert mine.route is not None
    if upload.whole:
        return None
    conn.upload = upload  # whatever refuses it now leaves the rest of it unread
    need = requirements_of_beginning(conn.door.fleet, mine.route, upload.beginning, head)
    if need is None:
        conn.upload = None
    return need


async def _streamed(
    conn: Connection, mine: Exchange, head: RequestHead, need: Requirements
) -> bool:
    """An answer that came before the body's end is relayed; then that is all for the connection."""
    keep = await _inspected(conn, mine, head, b"", need)
    upload, conn.upload = conn.upload, None
    if upload is not None and not upload.whole and not conn.client.closed:
        await linger(conn)
        return False
    return keep


def _inspected(
    conn: Connection,
    mine: Exchange,
    head: RequestHead,
    body: bytes,
    known: Requirements | None = None,
) -> Coroutine[Any, Any, bool]:
    route = mine.route
    assert route is not None
    need = mine.need = known or inspect_request(route, body, head)
    if need.large_body_class:
        settle_large(conn.door.fleet, need)
    if route.traffic != "generation":
        pin_to_voice_owner(conn.door.voices, route.traffic, need)
    mine.stream = need.stream
    if conn.door.policy.needs_affinity_key:
        need.affinity_key = affinity_key_of(head.lines)
    mine.request_id = head.request_id or id_for(need)
    if conn.door.stamps is not None:
        stamp(conn.door.stamps, mine, head)
    if conn.client.peer_closed and conn.door.half_close_aborts:
        raise ClientDisconnected
    if need.stream:
        if conn.door.limits.sse_keepalive:
            conn.comments = SseKeepAlive(conn, mine, head)
    elif conn.door.limits.total < inf:
        conn.deadline = conn.loop.now + conn.door.limits.total
    return _by_worker(conn, mine, head, body)


async def _by_worker(
    conn: Connection, mine: Exchange, head: RequestHead, body: bytes, asked: Asked | None = None
) -> bool:
    """Try workers until one answers; `asked`: where the first was asked already.

    Raises HttpError when none did.
    """
    door = conn.door
    need, route = mine.need, mine.route
    assert need is not None
    assert route is not None
    mine.policy = mine.policy or door.policy.name
    tries: RetryState | None = None
    try:
        worker = mine.worker or take(door, mine)
    except HttpError as nobody:
        worker = await door.queue.wait_for_worker(conn, mine, nobody)
    while True:
        lines = with_key(worker, head.lines) if worker.api_key_env else head.lines
        way = (asked[0] if asked is not None else door.lane(worker), lines, body)
        try:
            first = await ask(conn, mine, head, way, asked)
        except AttemptFailed as failed:
            report(conn, mine, worker, failed.error)
            told = f"upstream request failed: {failed.error}"
            refusal = HttpError(failed.status, told, failed.kind)
            tries = tries or RetryState(conn, mine, len(body))
            asked = None
            worker = await tries.after(failed.kind, refusal)
            continue
        if first.answer.status < 400:
            break
        tries = tries or RetryState(conn, mine, len(body))
        other = await tries.after_answer(first)
        if other is None:
            break
        asked, worker = None, other
    del body, way
    if conn.held_bytes:
        conn.let_go()
    need.body_fields = None  # which holds it, too; nobody is picked any more
    keep = await relay(conn, mine, head, first)
    if (
        mine.outcome != "completed"
        or worker.health.failed_requests
        or route.pinning is not UNPINNED
    ):
        _learn(conn, mine, worker)
    return keep


def _learn(conn: Connection, mine: Exchange, worker: Worker) -> None:
    """What the end of an answer says of its worker."""
    door, route = conn.door, mine.route
    if mine.error and mine.ended_by == "worker":
        report(conn, mine, worker, mine.error)
    elif mine.outcome == "completed" and mine.status < 500 and worker.health.failed_requests:
        door.fleet.observe_success(worker, mine.half_open_id)
    if route is not None and route.pinning is VOICE_OWNER and _changed_voices(mine):
        door.keep_voices_at(worker)


def _changed_voices(mine: Exchange) -> bool:
    """From the first upload on its worker is the one that keeps the voices (omni-router.md 13)."""
    return mine.method in ("POST", "DELETE") and 200 <= mine.status < 300


async def _by_front(conn: Connection, mine: Exchange, head: RequestHead) -> bool:
    """The front is one more upstream: same relay, no policy, no health, no diagnostics."""
    door = conn.door
    limit = door.config.admin.max_body_bytes
    body = conn.body_at_hand(mine, head, limit)
    if body is None:
        if head.expects_continue and not conn.admin_only:
            _refuse_unknown(head)
        upload = await _begun(conn, mine, head, limit)
        await upload.hold_all()
        body = upload.take()
    elif body:
        conn.hold(len(body))
    if door.stamps is not None:
        mine.request_id = head.request_id or new_id()
        stamp(door.stamps, mine, head)
    conn.loop.admin_exchanges += 1
    hurries = True
    try:
        lane = door.admin_front if conn.admin_only else door.front
        first = await ask(conn, mine, head, (lane, _lines_for_front(conn, head), body))
        del body
        if conn.held_bytes:
            conn.let_go()
        if first.answer.sse:  # an event a second: others need not pay to have it sooner
            conn.loop.admin_exchanges -= 1
            hurries = False
        return await relay(conn, mine, head, first)
    except AttemptFailed as failed:
        raise HttpError(
            503, f"the control routes are not answering: {failed.error}", "front_unavailable"
        ) from None
    finally:
        conn.loop.admin_exchanges -= hurries


def _lines_for_front(conn: Connection, head: RequestHead) -> bytes:
    client = conn.client
    lines = head.lines + hint_lines(head.hints) + peer_field(conn.peer)
    local = client.sock.family == socket.AF_UNIX
    return with_received(lines, head.host, secure=client.is_tls, local=local)


def _refuse_unknown(head: RequestHead) -> None:
    """Who asks before he sends hears at once what the front would say in the end (RFC 9110 10.1.1).

    Raises HttpError 404.
    """
    method, _, path = head.log_words
    if not is_known(unquote(path)):
        raise HttpError(
            404, f"Not Found: {method} {path}", "not_found", close=True, detail="Not Found"
        )
