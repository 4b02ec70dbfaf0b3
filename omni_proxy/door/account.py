"""The accounts of one exchange: what it was, when each phase was reached, how it ended and by whom.

Invariant: `settle` runs exactly once per exchange, in a `finally`; after it the in-flight counts
hold nothing of this exchange. The two logs are written from here and from nowhere else. Source of
the route log's keys: omni-router.md 14.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from random import getrandbits
from typing import TYPE_CHECKING, Final

import msgspec

from omni_proxy.door.taking import leave
from omni_proxy.fleet.version import UNKNOWN
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect import Need
from omni_proxy.routing.table import Route
from omni_proxy.wire.head import RequestHead
from omni_proxy.wire.stamps import Stamps

if TYPE_CHECKING:
    from omni_proxy.door.connection import Connection
    from omni_proxy.door.core import Door

_encode = msgspec.json.encode
_TRY: Final = b"\r\nX-SGLang-Omni-Route-Attempt: %d\r\n"
_FIRST_TRY: Final = _TRY % 1  # not formatted each time: that alone is a hundred cache lines
_UNSHOWN = re.compile(r"[\s\\\x00-\x1f\x7f-\x9f]")


class Exchange:
    """One request with its answer. Times are of the pump's clock, 0.0 for a phase not reached."""

    __slots__ = (
        "admitted", "attempts", "body_at", "bytes_in", "bytes_out", "client", "connect_secs",
        "dialled_at", "ended_at", "ended_by", "error", "first_at", "head_at", "id_line",
        "idempotency_key", "last_worker", "longest_gap", "method", "need", "outcome", "own_secs",
        "phase", "pieces", "policy", "queued_secs", "relayed", "request_id", "route", "started_at",
        "status", "stream", "tail", "target", "trial", "tried", "version", "wait_at", "worker",
        "worker_seen",
    )  # fmt: skip

    def __init__(self, now: float, client: str) -> None:
        self.started_at = now  # its first byte
        self.head_at = self.body_at = self.dialled_at = self.wait_at = self.first_at = 0.0
        self.ended_at = 0.0
        self.client = client
        self.method = "-"  # until the head could be read
        self.target = "-"
        self.request_id = b""  # as in a head: text costs two conversions
        self.id_line = b""  # the field that carries it in heads, where one was asked for
        self.idempotency_key = False
        self.route: Route | None = None
        self.need: Need | None = None
        self.policy = ""
        self.worker: Worker | None = None
        self.last_worker: Worker | None = None  # of a try that is over
        self.version = UNKNOWN  # of its weights when the present try began
        self.worker_seen: tuple[str, bool, bool] = ("", False, False)
        self.attempts = 0
        self.tried: list[tuple[Worker, str]] | None = None  # failed tries and what they came to
        self.trial = 0  # the number of the trial that the present try is
        self.queued_secs = 0.0
        self.connect_secs = 0.0  # for the newest connection that had to be opened
        self.own_secs = 0.0  # from the events that it came with until it was on its way
        self.longest_gap = 0.0  # between two pieces of the answer
        self.tail = b""  # its last piece, where somebody wants to read `usage` in it
        self.admitted = False
        self.relayed = False  # bytes of an answer have left for the client
        self.stream = False
        self.status = 0
        self.bytes_in = self.bytes_out = self.pieces = 0
        self.outcome = ""
        self.ended_by = ""
        self.error = ""
        self.phase = ""

    def end(self, outcome: str, by: str, error: str = "", *, phase: str = "") -> None:
        """Say how it ended and where; the first word stands."""
        if not self.outcome:
            self.outcome, self.ended_by, self.error, self.phase = outcome, by, error, phase


def new_id() -> bytes:
    return b"%032x" % getrandbits(128)


def told_id(exchange: Exchange) -> str:
    return exchange.request_id.decode("latin-1")


def stamp(stamps: Stamps, mine: Exchange, head: RequestHead) -> None:
    """The client's address and the request's id into the lines that go on, as configured."""
    head.lines += stamps.peer_line(mine.client)
    if stamps.id_name:
        head.lines = stamps.with_id(head.lines, mine.request_id)
        mine.id_line = stamps.id_line(mine.request_id)


def settle(door: Door, exchange: Exchange, phase: str) -> None:
    """Close the books: `phase` is where the connection stood when the exchange ended."""
    worker = exchange.worker or exchange.last_worker
    exchange.phase = exchange.phase or phase
    exchange.ended_at = door.pump.now
    completed = exchange.outcome == "completed"
    leave(door, exchange, succeeded=completed and 0 < exchange.status < 400)
    if worker is not None and worker.version is not exchange.version:
        door.across_versions += _spans(exchange, worker)
    if exchange.admitted:
        door.in_flight -= 1
    if door.queue.waiting:
        door.queue.serve()
    door.ended[exchange.outcome or "cut_by_proxy"] += 1
    if door.meters is not None:
        door.meters.count(exchange, worker)
    if door.access_log is not None:
        line = access_record(exchange, worker)
        door.access_log.write(line if door.access_json else access_text(line))
    if door.route_log is not None and worker is not None:
        door.route_log.write(_encode(route_record(exchange, worker), order="sorted"))


def _spans(exchange: Exchange, worker: Worker) -> bool:
    """Whether an answer of it has begun with other weights than it ended with."""
    return exchange.relayed and worker.version.changed_since(exchange.version)


def report(
    conn: Connection, mine: Exchange, worker: Worker, error: str, status: int | None = None
) -> None:
    """Let health know of a failure that was the worker's."""
    conn.door.fleet.observe_request_failure(
        worker, status=status, error=error, at=datetime.now(UTC), trial=mine.trial
    )


def diagnostics(mine: Exchange) -> bytes:
    """The response headers of omni-router.md 10, for answers of a worker or about one."""
    worker = mine.worker or mine.last_worker
    route_line = worker.route_line if worker is not None else b""
    number = _FIRST_TRY if mine.attempts == 1 else _TRY % mine.attempts
    lines = b"".join((route_line, b"X-SGLang-Omni-Request-ID: ", mine.request_id, number))
    if mine.tried:
        told = ", ".join(f"{tried.display_id}={outcome}" for tried, outcome in outcomes(mine))
        lines += b"x-omni-attempts: %b\r\n" % told.encode("latin-1", "replace")
    return lines


def outcomes(mine: Exchange) -> list[tuple[Worker, str]]:
    """What each try came to, in their order: the failed ones, then the worker's answer."""
    tried = list(mine.tried or ())
    worker = mine.worker or mine.last_worker
    if worker is not None and mine.wait_at and len(tried) < mine.attempts:
        tried.append((worker, str(mine.status)))
    return tried


def _ms(later: float, earlier: float) -> float | None:
    return round((later - earlier) * 1000, 3) if later and earlier else None


def access_record(exchange: Exchange, worker: Worker | None) -> bytes:
    """One JSON line: who, what, where to, the time to each phase, and who ended it in which
    phase."""
    start = exchange.started_at
    need = exchange.need
    record = {
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "client": exchange.client,
        "method": exchange.method,
        "target": exchange.target,
        "status": exchange.status,
        "outcome": exchange.outcome or "cut_by_proxy",
        "ended_by": exchange.ended_by,
        "phase": exchange.phase,
        "error": exchange.error or None,
        "request_id": told_id(exchange) or None,
        "model": need.model if need else None,
        "stream": exchange.stream,
        "worker": worker.url if worker else None,
        "policy": exchange.policy or None,
        "attempts": exchange.attempts,
        "weight_version": exchange.version.label,
        "weight_epoch": exchange.version.epoch or None,
        "weight_version_end": worker.version.shown if worker and _spans(exchange, worker) else None,
        "tried": [
            {"worker": tried.url, "outcome": outcome} for tried, outcome in outcomes(exchange)
        ],
        "queue_ms": round(exchange.queued_secs * 1000, 3),
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
        "pieces": exchange.pieces,
        "head_ms": _ms(exchange.head_at, start),
        "body_ms": _ms(exchange.body_at, start),
        "connect_ms": _ms(exchange.dialled_at, start),
        "answer_ms": _ms(exchange.wait_at, start),
        "first_ms": _ms(exchange.first_at, start),
        "total_ms": _ms(exchange.ended_at, start),
    }
    return _encode(record)


def access_text(line: bytes) -> bytes:
    """The same record for people, empty fields left out. No field holds a space."""
    record = msgspec.json.decode(line)
    tried = record.pop("tried")
    if len(tried) > 1:
        record["tried"] = ",".join(f"{each['worker']}={each['outcome']}" for each in tried)
    said = [
        f"{record.pop(key)}" for key in ("at", "client", "method", "target", "status", "outcome")
    ]
    said += (
        f"{key}={str(value).lower() if value is True else value}"
        for key, value in record.items()
        if value not in (None, "", 0)
    )
    return " ".join(_UNSHOWN.sub(_escaped, each) for each in said).encode()


def _escaped(found: re.Match[str]) -> str:
    """A client names its model: no line and no field of the log may be of its making."""
    return "\\x20" if found[0] == " " else found[0].encode("unicode_escape").decode()


def route_record(exchange: Exchange, worker: Worker) -> dict[str, object]:
    need, route = exchange.need, exchange.route
    state, disabled, routable = exchange.worker_seen
    completed = exchange.outcome == "completed"
    finished = "stream_complete" if exchange.stream else "request_complete"
    broken = "stream_error" if exchange.stream else "request_complete"
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "event": finished if completed else broken,
        "request_id": told_id(exchange),
        "method": exchange.method,
        "path": exchange.target.partition("?")[0],
        "model": need.model if need else None,
        "stream": exchange.stream,
        "required_capabilities": need.capabilities if need else [],
        "worker_id": worker.id,
        "worker_url": worker.url,
        "policy": exchange.policy,
        "worker_state": state,
        "worker_health_state": state,
        "worker_disabled": disabled,
        "worker_routable": routable,
        "attempt": exchange.attempts,
        "status_code": exchange.status or None,
        "duration_s": round(exchange.ended_at - exchange.started_at, 6),
        "ttfb_s": round(exchange.first_at - exchange.started_at, 6) if exchange.first_at else None,
        "request_bytes": exchange.bytes_in,
        "response_bytes": exchange.bytes_out,
        "completed": completed,
        "client_disconnected": exchange.ended_by == "client",
        "error_type": exchange.error or None,
        "idempotency_key_present": exchange.idempotency_key,
        "traffic": route.traffic if route else None,
    }
