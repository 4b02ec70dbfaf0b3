"""The accounts of one exchange: what it was, when each phase was reached, how it ended and by whom.

Invariant: `settle` or `settle_whole` runs exactly once per exchange, in a `finally`; after it the
in-flight counts hold nothing of this exchange. What is logged is logged from here alone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from random import getrandbits
from typing import TYPE_CHECKING, Final

from omni_proxy.dataplane.exchange.access_log import log
from omni_proxy.dataplane.upstream.acquire import leave
from omni_proxy.fleet.weight_version import UNKNOWN_VERSION
from omni_proxy.fleet.worker import FAILED, SUCCEEDED, Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import Route
from omni_proxy.wire.forwarded import ForwardedHeaders
from omni_proxy.wire.request import RequestHead

if TYPE_CHECKING:
    from omni_proxy.dataplane.dataplane import DataPlane
    from omni_proxy.dataplane.downstream.connection import Connection

_TRY: Final = b"\r\nX-SGLang-Omni-Route-Attempt: %d\r\n"
REQUEST_ID: Final = b"X-SGLang-Omni-Request-ID: "
FIRST_TRY: Final = _TRY % 1  # not formatted each time: that alone is a hundred cache lines


# What an exchange of the short way has set by the time it was let in; by the time a worker was
# taken for it; by the time that worker was asked.
BEGUN: Final = (
    "method", "target", "route", "idempotency_key", "head_at", "body_at", "need", "stream",
    "request_id", "bytes_in", "policy", "admitted",
)  # fmt: skip
TAKEN: Final = ("worker", "version", "worker_seen", "attempts", "half_open_id")
ASKED: Final = ("dialled_at", "own_secs")


class Exchange:
    """One request with its answer. Times are of the pump's clock, 0.0 for a phase not reached."""

    __slots__ = (
        "admitted",
        "attempts",
        "body_at",
        "bytes_in",
        "bytes_out",
        "client",
        "connect_secs",
        "cors",
        "dialled_at",
        "ended_at",
        "ended_by",
        "error",
        "first_at",
        "half_open_id",
        "head_at",
        "idempotency_key",
        "last_worker",
        "longest_gap",
        "method",
        "need",
        "outcome",
        "own_secs",
        "phase",
        "pieces",
        "policy",
        "queued_secs",
        "relayed",
        "request_id",
        "request_id_line",
        "route",
        "started_at",
        "status",
        "stream",
        "tail",
        "target",
        "tried",
        "version",
        "wait_at",
        "worker",
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
        self.cors = b""  # fields that let a page of another origin read the answer
        self.request_id_line = b""  # the field that carries it in heads, where one was asked for
        self.idempotency_key = False
        self.route: Route | None = None
        self.need: Requirements | None = None
        self.policy = ""
        self.worker: Worker | None = None
        self.last_worker: Worker | None = None  # of a try that is over
        self.version = UNKNOWN_VERSION  # of its weights when the present try began
        self.worker_seen: tuple[str, bool, bool] = ("", False, False)
        self.attempts = 0
        self.tried: list[tuple[Worker, str]] | None = None  # failed tries and what they came to
        self.half_open_id = 0  # the number of the trial that the present try is
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

    def as_begun(self, *, asked: bool) -> Exchange:
        """A new one in the place of one that was used before, as far as that has come now; `asked`:
        its worker has the request."""
        begun = Exchange(self.started_at, self.client)
        names = BEGUN if self.worker is None else (*BEGUN, *TAKEN, *(ASKED if asked else ()))
        for name in names:
            setattr(begun, name, getattr(self, name))
        return begun

    def end(self, outcome: str, by: str, error: str = "", *, phase: str = "") -> None:
        """Say how it ended and where; the first word stands."""
        if not self.outcome:
            self.outcome, self.ended_by, self.error, self.phase = outcome, by, error, phase

    def outcomes(self) -> list[tuple[Worker, str]]:
        """What each try came to, in their order: the failed ones, then the worker's answer."""
        tried = list(self.tried or ())
        worker = self.worker or self.last_worker
        if worker is not None and self.wait_at and len(tried) < self.attempts:
            tried.append((worker, str(self.status)))
        return tried

    def spans_versions(self, worker: Worker) -> bool:
        """Whether its answer has begun with other weights than it ended with."""
        return self.relayed and worker.version.differs_from(self.version)


def new_id() -> bytes:
    return b"%032x" % getrandbits(128)


def id_for(need: Requirements) -> bytes:
    """Of a request whose head has none. One out of a body may hold anything; in a head only visible
    ASCII may stand."""
    text = need.request_id
    if text and len(text) <= 256 and text.isascii() and text.isprintable():
        return text.encode()
    return new_id()


def stamp(stamps: ForwardedHeaders, mine: Exchange, head: RequestHead) -> None:
    """The client's address and the request's id into the lines that go on, as configured."""
    head.lines += stamps.forwarded_for_line(mine.client)
    if stamps.id_name:
        head.lines = stamps.set_request_id(head.lines, mine.request_id)
        mine.request_id_line = stamps.request_id_line(mine.request_id)


def settle_whole(door: DataPlane, exchange: Exchange, worker: Worker) -> None:
    """As `settle`, of one try at `worker` that went the short way to its end: completed, no trial,
    with the weights that it began with."""
    exchange.ended_at = exchange.first_at
    exchange.worker, exchange.last_worker = None, worker
    worker.in_flight -= 1
    route = exchange.route
    assert route is not None
    worker.counts[route.counter_index + (SUCCEEDED if exchange.status < 400 else FAILED)] += 1
    door.in_flight -= 1
    if door.queue.waiting:
        door.queue.serve()
    door.ended["completed"] += 1
    if door.meters is not None:
        door.meters.record_single_chunk(exchange, worker)
    if door.access_log is not None or door.route_log is not None:
        log(door, exchange, worker)


def settle(door: DataPlane, exchange: Exchange, phase: str) -> None:
    """Close the books: `phase` is where the connection stood when the exchange ended."""
    worker = exchange.worker or exchange.last_worker
    exchange.phase = exchange.phase or phase
    exchange.ended_at = door.loop.now
    good = exchange.outcome == "completed" and 0 < exchange.status < 400
    leave(door, exchange, SUCCEEDED if good else FAILED)
    if worker is not None and worker.version is not exchange.version:
        door.across_versions += exchange.spans_versions(worker)
    if exchange.admitted:
        door.in_flight -= 1
    if door.queue.waiting:
        door.queue.serve()
    door.ended[exchange.outcome or "cut_by_proxy"] += 1
    if door.meters is not None:
        door.meters.record(exchange, worker)
    log(door, exchange, worker)


def report(
    conn: Connection, mine: Exchange, worker: Worker, error: str, status: int | None = None
) -> None:
    """Let health know of a failure that was the worker's."""
    conn.door.fleet.observe_request_failure(
        worker, status=status, error=error, at=datetime.now(UTC), half_open_id=mine.half_open_id
    )


def diagnostics(mine: Exchange) -> bytes:
    """The response headers of omni-router.md 10, for answers of a worker or about one."""
    worker = mine.worker or mine.last_worker
    route_line = worker.route_line if worker is not None else b""
    number = FIRST_TRY if mine.attempts == 1 else _TRY % mine.attempts
    lines = b"".join((route_line, REQUEST_ID, mine.request_id, number))
    if mine.tried:
        told = ", ".join(f"{tried.display_id}={outcome}" for tried, outcome in mine.outcomes())
        lines += b"x-omni-attempts: %b\r\n" % told.encode("latin-1", "replace")
    return lines
