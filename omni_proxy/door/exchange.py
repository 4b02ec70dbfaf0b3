"""One exchange from inspection to account: which upstream, how many tries, what a failure becomes.

Invariant: a try is repeated only while not one byte of an answer has left for the client. Every
worker taken is left again, on every path. Health hears of transport errors, timeouts before the
head, broken bodies, and relayed 502 and 504; of nothing else, and never of a client that left.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine
from datetime import UTC, datetime
from math import inf
from random import getrandbits
from typing import TYPE_CHECKING, Any

from omni_proxy.door import speech
from omni_proxy.door.account import Exchange
from omni_proxy.door.ask import TryFailed, ask
from omni_proxy.door.relay import relay
from omni_proxy.door.task import Gone
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect import inspect
from omni_proxy.routing.pick import choose
from omni_proxy.routing.retry import may_retry, tries_allowed
from omni_proxy.routing.table import Place, WrongMethod, match
from omni_proxy.wire.errors import Refusal
from omni_proxy.wire.head import HINT_PREFIX, RequestHead, drop_fields

if TYPE_CHECKING:
    from omni_proxy.door.connection import Connection

TELLING_STATUSES = (502, 504)  # a worker that says these speaks of its own health


def answer(conn: Connection, mine: Exchange, head: RequestHead) -> Coroutine[Any, Any, bool]:
    """What will answer it; its result says whether the connection may go on.

    Both this and that raise Refusal, that also Expired and Gone. No coroutine itself: this frame
    would be resumed through at every event.
    """
    mine.head_at = conn.pump.now
    mine.method, mine.target, path = head.words
    try:
        route = match(mine.method, path)
    except WrongMethod as wrong:
        allowed = ", ".join(sorted(wrong.allowed))
        raise Refusal(
            405, f"this path takes {allowed}", "method_not_allowed",
            close=bool(head.length), detail="Method Not Allowed",
        ).with_headers(("allow", allowed)) from None  # fmt: skip
    if route is None:
        return _by_front(conn, mine, head)
    mine.route = route
    mine.idempotency_key = head.idempotency_key
    if route.websocket:
        return speech.session(conn, mine, head)  # admits when it can say no in its own way
    conn.door.admit(mine, unread=bool(head.length))
    limit = conn.door.limits.max_body
    body = conn.body_at_hand(mine, head, limit)
    if body is None:
        return _when_read(conn, mine, head)
    return _inspected(conn, mine, head, body)


async def _when_read(conn: Connection, mine: Exchange, head: RequestHead) -> bool:
    body = await conn.read_body(mine, head, conn.door.limits.max_body)
    return await _inspected(conn, mine, head, body)


def _inspected(
    conn: Connection, mine: Exchange, head: RequestHead, body: bytes
) -> Coroutine[Any, Any, bool]:
    route = mine.route
    assert route is not None
    need = mine.need = inspect(route, body, head)
    mine.stream = need.stream
    mine.request_id = (
        head.request_id.decode("latin-1")
        or _printable(need.request_id)
        or f"{getrandbits(128):032x}"
    )
    if conn.client.ended and conn.door.half_close_aborts:
        raise Gone
    return _by_worker(conn, mine, head, body)


def _printable(text: str) -> str:
    """A request id out of a body may hold anything; in a head only visible ASCII may stand."""
    return text if len(text) <= 256 and text.isascii() and text.isprintable() else ""


async def _by_worker(conn: Connection, mine: Exchange, head: RequestHead, body: bytes) -> bool:
    """Try workers until one answers. Raises Refusal when none did."""
    door = conn.door
    need, route = mine.need, mine.route
    assert need is not None
    assert route is not None
    mine.policy = door.policy.name
    if not need.stream and door.limits.total < inf:
        conn.deadline = conn.pump.now + door.limits.total
    allowed = tries_allowed(door.config.routing.max_total_retries)
    tried: set[Worker] = set()
    last: Refusal | None = None
    while True:
        try:
            worker = choose(door.fleet, need, door.policy, tried=tried, owner=door.voice_owner)
        except Refusal as nobody:
            raise last or nobody from None  # the failed try says more than "nobody is left"
        mine.take(worker, noted=door.route_log is not None)
        way = (door.lane(worker), _lines_for(worker, head), body)
        try:
            first = await ask(conn, mine, head, way)
        except TryFailed as failed:
            _report(conn, worker, None, failed.error)
            last = Refusal(failed.status, f"upstream request failed: {failed.error}", failed.kind)
            if not may_retry(failed.kind, mine.attempts, allowed, door.config.routing.retry_on):
                raise last from None
            mine.leave(succeeded=False)
            tried.add(worker)
            continue
        if first.answer.status in TELLING_STATUSES:
            _report(conn, worker, first.answer.status, f"status={first.answer.status}")
        keep = await relay(conn, mine, head, first)
        if mine.error and mine.ended_by == "worker":
            _report(conn, worker, None, mine.error)
        if route.place is Place.VOICE_OWNER and _kept_a_voice(mine):
            door.voice_owner = worker.url
        return keep


def _kept_a_voice(mine: Exchange) -> bool:
    """From the first upload on its worker is the one that keeps the voices (omni-router.md 13)."""
    return mine.method == "POST" and 200 <= mine.status < 300


async def _by_front(conn: Connection, mine: Exchange, head: RequestHead) -> bool:
    """The front is one more upstream: same relay, no policy, no health, no diagnostics."""
    door = conn.door
    limit = door.config.admin.max_body_bytes
    body = conn.body_at_hand(mine, head, limit)
    if body is None:
        body = await conn.read_body(mine, head, limit)
    hints = b"".join(b"%b%b: %b\r\n" % (HINT_PREFIX, *hint) for hint in head.hints.items())
    conn.pump.front_exchanges += 1
    try:
        first = await ask(conn, mine, head, (door.front, head.lines + hints, body))
        return await relay(conn, mine, head, first)
    except TryFailed as failed:
        raise Refusal(
            503, f"the control routes are not answering: {failed.error}", "front_unavailable"
        ) from None
    finally:
        conn.pump.front_exchanges -= 1


def _lines_for(worker: Worker, head: RequestHead) -> bytes:
    key = os.environ.get(worker.api_key_env, "") if worker.api_key_env else ""
    if not key:
        return head.lines
    lines = drop_fields(head.lines, frozenset((b"authorization",)))
    return lines + b"authorization: Bearer " + key.encode("latin-1", "replace") + b"\r\n"


def _report(conn: Connection, worker: Worker, status: int | None, error: str) -> None:
    conn.door.fleet.observe_request_failure(
        worker, status=status, error=error, at=datetime.now(UTC)
    )
