"""The recent past: a point per second for 15 minutes, each worker's last minute, recent exchanges.

Invariant: everything here is bounded, whatever clients send. Pure: `tick` is called once a second
with the time; `Metrics` adds the finished exchanges. A worker's last minute is the difference of
two totals, so no counter has to be reset while requests are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import add, sub
from typing import TYPE_CHECKING, Final, NamedTuple

from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.explanation import PickRecord
from omni_proxy.telemetry.histogram import FINE, filled_buckets, quantiles

if TYPE_CHECKING:
    from omni_proxy.dataplane.exchange.exchange import Exchange

POINTS: Final = 900
MARK_SECS: Final = 10
WINDOW_SECS: Final = 60  # a worker's window has its last 50 to 60 seconds, never more
KEPT_ENDS: Final = 50
KEPT_FAILURES: Final = 150
ENDS_PER_SECOND: Final = 5  # so that a busy second does not displace all others
FAILURES_PER_SECOND: Final = 30
TEXT_CHARS: Final = 200


@dataclass(slots=True)
class WindowCounts:
    """Counts over some time. `firsts`: first chunks by bucket of FINE."""

    requests: int = 0
    errors: int = 0
    failures: int = 0
    marked_at: float = 0.0  # Unix time of its last copy
    firsts: list[int] = field(default_factory=lambda: [0] * (len(FINE) + 1))

    def copy(self) -> WindowCounts:
        return WindowCounts(self.requests, self.errors, firsts=self.firsts.copy())


class Point(NamedTuple):
    """One second. `at` is Unix time; latencies are in milliseconds, None if no response began."""

    at: int
    requests: int
    errors: int
    first_p50_ms: float | None
    first_p99_ms: float | None
    in_flight: int
    waiting: int


class WorkerWindow(NamedTuple):
    """A worker's last minute. `answers`: responses that began; the latencies are of these."""

    rate: float
    errors: int
    answers: int
    first_p50_ms: float | None
    first_p99_ms: float | None


class RequestSteps(NamedTuple):
    """The steps of an exchange, in seconds. `sent_secs` and `head_secs` count from its first
    byte."""

    prefill: str = ""  # the worker of its prefill leg, if it had one
    prefill_secs: float | None = None
    fallback: str = ""  # why there was no prefill leg
    tried: tuple[tuple[str, str], ...] = ()  # each attempt's worker and result, if one failed
    queued_secs: float = 0.0
    sent_secs: float | None = None  # when it was sent to the worker
    head_secs: float | None = None  # when the head of the response arrived
    longest_gap: float = 0.0
    policy: str = ""
    caller: str = ""  # the name of its key in [[keys]]
    client: str = ""
    trace_id: str = ""  # if its trace is sampled
    stream: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    chunks: int = 0
    rank: str = ""  # the data-parallel rank, if the worker has ranks
    weight_version: str = ""
    candidates: PickRecord | None = None  # if they were recorded


class FinishedExchange(NamedTuple):
    """A finished exchange. `at` is a time of `time.monotonic`."""

    at: float
    route: str
    model: str | None
    worker: str
    status: int
    end: str
    ended_by: str
    phase: str
    error: str
    attempts: int
    first_secs: float | None
    total_secs: float
    request_id: str
    target_model: str | None = None  # the alias target, if `model` is an alias
    steps: RequestSteps = RequestSteps()


def _gather_nothing(_: Worker | None) -> None:
    """The default of `RecentWindow.gather`: nothing is deferred."""


class RecentWindow:
    """`Metrics` counts into `second` and `sums`, and adds some of the finished exchanges.

    `completed_left`: how many more completed exchanges may be added in this second.
    `single_chunk_counts`: counts by bucket of FINE that have yet to be added to `second`.
    `gather(worker)` merges the deferred counts of a worker, or of all for None, into `sums`.
    """

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.second = WindowCounts()
        self.single_chunk_counts = [0] * (len(FINE) + 1)
        self.completed_left = ENDS_PER_SECOND
        self.sums: dict[Worker | None, WindowCounts] = {}  # totals since the worker was added
        self.gather: Callable[[Worker | None], None] = _gather_nothing
        self._began = 0.0  # Unix time
        # Copies of the totals, with their Unix times, of about the last WINDOW_SECS.
        self._marks: dict[Worker | None, deque[tuple[float, WindowCounts]]] = {}
        self._ends: deque[FinishedExchange] = deque(maxlen=KEPT_ENDS)
        self._failures: deque[FinishedExchange] = deque(maxlen=KEPT_FAILURES)

    def keep(self, workers: Collection[Worker | None]) -> None:
        """Drop the counts of all other workers."""
        for worker in [old for old in self.sums if old not in workers]:
            del self.sums[worker]
            self._marks.pop(worker, None)

    def note_completed(self, exchange: Exchange, worker: Worker | None) -> None:
        """Add an exchange that completed."""
        self.completed_left = max(0, self.completed_left - 1)
        self._ends.append(_end_of(exchange, worker))

    def note_failed(self, exchange: Exchange, worker: Worker | None, slot: WindowCounts) -> None:
        """Add an exchange that failed; it counts as an error unless the client caused it."""
        cut = (
            exchange.outcome != "completed"
            and exchange.status < 400
            and exchange.ended_by != "client"
        )
        if cut or exchange.status >= 500:
            slot.errors += 1
            self.second.errors += 1
        if self.second.failures < FAILURES_PER_SECOND:
            self.second.failures += 1
            self._failures.append(_end_of(exchange, worker))

    def add_finished(self, end: FinishedExchange, *, failed: bool) -> None:
        """Add an exchange of another process, with times of the same clock."""
        (self._failures if failed else self._ends).append(end)

    def current_second(self) -> WindowCounts:
        second = self.second
        second.requests += sum(self.single_chunk_counts)
        second.firsts = list(map(add, second.firsts, self.single_chunk_counts))
        self.single_chunk_counts = [0] * len(self.single_chunk_counts)
        return second

    def tick(self, at: float, in_flight: int, waiting: int) -> WindowCounts:
        """End the current second, at the Unix time `at`. Returns its counts."""
        self._began = self._began or at - 1
        second, self.second = self.current_second(), WindowCounts()
        self.completed_left = ENDS_PER_SECOND
        self.points.append(
            Point(int(at), second.requests, second.errors, *_firsts(second), in_flight, waiting)
        )
        self._mark(at)
        return second

    def _mark(self, at: float) -> None:
        """Copy each worker's totals every ten seconds; each call copies a tenth of the workers."""
        since = at - MARK_SECS
        due = (worker for worker, slot in self.sums.items() if slot.marked_at <= since)
        for worker in list(islice(due, len(self.sums) // MARK_SECS + 1)):
            self.gather(worker)
            slot = self.sums[worker]
            slot.marked_at = at
            marks = self._marks.setdefault(worker, deque())
            marks.append((at, slot.copy()))
            while len(marks) > 1 and at - marks[1][0] > WINDOW_SECS:
                marks.popleft()

    def last_minute(self) -> tuple[int, int]:
        """Requests that ended in the last minute, and errors among them.

        As in `worker_window` the running second counts, so that the fleet's numbers are never below
        those of its workers.
        """
        second = self.current_second()
        last = list(islice(reversed(self.points), WINDOW_SECS))
        requests = second.requests + sum(point.requests for point in last)
        return requests, second.errors + sum(point.errors for point in last)

    def worker_window(self, worker: Worker, at: float) -> WorkerWindow:
        self.gather(worker)
        now, then = self.sums.get(worker) or WindowCounts(), WindowCounts()
        start = max(self._began or at - 1, at - WINDOW_SECS)
        marks = self._marks.get(worker, ())
        if marks and at - marks[0][0] > WINDOW_SECS:
            # Never longer than the minute of `points`, which is shown on the same screen.
            inside = (mark for mark in marks if at - mark[0] <= WINDOW_SECS)
            start, then = next(inside, marks[-1])
        recent = WindowCounts(
            requests=now.requests - then.requests,
            errors=now.errors - then.errors,
            firsts=list(map(sub, now.firsts, then.firsts)),
        )
        rate = round(recent.requests / max(at - start, 1.0), 2)
        return WorkerWindow(rate, recent.errors, sum(recent.firsts), *_firsts(recent))

    def ends(self) -> list[FinishedExchange]:
        """Recent exchanges, newest first."""
        return sorted((*self._ends, *self._failures), key=lambda end: end.at, reverse=True)

    def since(self, at: int) -> Iterable[Point]:
        """The points after that second, oldest first."""
        newer = []
        for point in reversed(self.points):
            if point.at <= at:
                break
            newer.append(point)
        return reversed(newer)


def _end_of(exchange: Exchange, worker: Worker | None) -> FinishedExchange:
    """Texts are truncated because clients and workers choose them."""
    requirements, route = exchange.requirements, exchange.route
    model = requirements.asked_model if requirements is not None else None
    target = requirements.target_model if requirements is not None else None
    return FinishedExchange(
        exchange.ended_at,
        route.path if route is not None else "",
        model[:TEXT_CHARS] if model else model,
        worker.url if worker is not None else "",
        exchange.status,
        exchange.outcome or "cut_by_proxy",
        exchange.ended_by,
        exchange.phase,
        exchange.error[:TEXT_CHARS],
        exchange.attempts,
        exchange.first_at - exchange.started_at if exchange.first_at else None,
        exchange.ended_at - exchange.started_at,
        exchange.request_id[:TEXT_CHARS].decode("latin-1"),
        target[:TEXT_CHARS] if target else target,
        _steps_of(exchange),
    )


def _steps_of(exchange: Exchange) -> RequestSteps:
    legs, trace, target = exchange.legs, exchange.trace, exchange.sent_to
    leg = legs.prefill if legs is not None else None
    prefill = leg.sent_to if leg is not None else None
    tried = exchange.attempt_results() if exchange.failed_attempts else []
    return RequestSteps(
        prefill=prefill.worker.url if prefill is not None else "",
        prefill_secs=leg.ended_at - leg.started_at if leg is not None and leg.ended_at else None,
        fallback=legs.fallback if legs is not None else "",
        tried=tuple((worker.url, result) for worker, result in tried),
        queued_secs=exchange.queued_secs,
        sent_secs=_since(exchange, exchange.sent_at),
        head_secs=_since(exchange, exchange.response_head_at),
        longest_gap=exchange.longest_gap,
        policy=exchange.policy,
        caller=exchange.caller.name if exchange.caller is not None else "",
        client=exchange.client,
        trace_id=trace.trace_id.decode() if trace is not None and trace.sampled else "",
        stream=exchange.stream,
        bytes_in=exchange.bytes_in,
        bytes_out=exchange.bytes_out,
        chunks=exchange.chunks,
        rank=str(target.index) if isinstance(target, DpRank) else "",
        weight_version=(exchange.weight_version.label or "")[:TEXT_CHARS],
        candidates=exchange.candidates,
    )


def _since(exchange: Exchange, at: float) -> float | None:
    return at - exchange.started_at if at else None


def _firsts(slot: WindowCounts) -> tuple[float | None, float | None]:
    """The median and the 99th percentile in milliseconds; None if there is nothing."""
    found = quantiles(filled_buckets(slot.firsts), (0.5, 0.99))
    if not found:
        return None, None
    median, p99 = found
    return round(median * 1000, 1), round(p99 * 1000, 1)
