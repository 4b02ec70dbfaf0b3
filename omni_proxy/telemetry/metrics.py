"""Counts of finished exchanges, and of streams while they run, as plain numbers.

Invariant: `record` is cheap, and neither waits nor fails. Its labels are bounded: routes are those
of the route table, workers those of the fleet, and a model that no worker serves is "other". No
body is read, except for its last chunk if the `usage` in it is counted.

Exchanges are counted in one `RouteSeries` per route and worker and one `RoutePhases` per route.
Invariant: a response of a single chunk is counted only in `SingleChunkCounts`, at the cost of one
index and three sums, until `gather` distributes it to the exported histograms. So every reader of
a series must gather it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import compress
from sys import intern
from time import monotonic, time
from typing import TYPE_CHECKING, Final, TypeVar

from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.response_usage import read_cached_tokens, tokens_in
from omni_proxy.telemetry.bucket_index import bucket_of
from omni_proxy.telemetry.histogram import (
    BETWEEN_CHUNKS,
    COARSE,
    DURATION,
    FINE,
    LONGEST_GAP,
    SHORT,
    Exemplars,
    Histogram,
    LateHistogram,
)
from omni_proxy.telemetry.recent_window import TEXT_CHARS, RecentWindow, WindowCounts

if TYPE_CHECKING:
    from omni_proxy.dataplane.exchange.exchange import Exchange, TwoLegs


EndKey = tuple[str | None, int, str]  # model, status class, outcome

NO_MODEL_SEEN: Final = object()  # equal to no model
_PLACES: Final = range(len(FINE) + 1)


class RoutePhases:
    """The times of one route, over all workers.

    `heads` and `own`: times that have yet to be counted in `head` and `overhead`.
    """

    __slots__ = ("connect", "head", "heads", "longest_gap", "overhead", "own", "queue")

    def __init__(self) -> None:
        self.heads: list[float] = []
        self.own: list[float] = []
        self.queue = Histogram(DURATION)
        self.connect = Histogram(SHORT)
        self.head = Histogram(FINE)
        self.longest_gap = Histogram(LONGEST_GAP)
        self.overhead = Histogram(SHORT)

    def gather(self) -> None:
        self.head.observe_all(self.heads)
        self.overhead.observe_all(self.own)


class SingleChunkCounts:
    """Counters of single-chunk responses. They are in one object because with many workers each
    access is a miss of the CPU caches.

    `single_chunk_counts`: requests by bucket of FINE. All ended with 2xx, and have the same model:
    `model_key` as the client sent it, `model` as its label.
    """

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "model",
        "model_key",
        "phases",
        "single_chunk_counts",
        "single_chunk_secs",
    )

    def __init__(self, phases: RoutePhases) -> None:
        self.phases = phases
        self.model_key: object = NO_MODEL_SEEN
        self.model: str | None = None
        self.single_chunk_counts = [0] * len(_PLACES)
        self.single_chunk_secs = 0.0
        self.bytes_in = self.bytes_out = 0


class RouteSeries(SingleChunkCounts):
    """The series of one route on one worker, or of requests that were sent to no worker."""

    __slots__ = (
        "between", "cached_tokens", "chunks", "ends", "first", "prompt_tokens", "tokens", "total",
    )  # fmt: skip

    def __init__(self, phases: RoutePhases) -> None:
        super().__init__(phases)
        self.ends: dict[EndKey, int] = {}
        self.total = Histogram(DURATION)
        self.first = Histogram(FINE)
        self.between = LateHistogram(BETWEEN_CHUNKS)
        self.chunks = 0
        self.tokens: Counter[tuple[str | None, str]] = Counter()  # model, type
        # Of responses that report both: the cached tokens and all tokens of their prompts.
        self.cached_tokens = self.prompt_tokens = 0

    def gather(self, recent: WindowCounts) -> None:
        """Distribute single-chunk responses to the histograms, and to the worker's slot. It runs
        for all workers in one call, so the loop over indexes must be cheap."""
        counts = list(compress(self.single_chunk_counts, self.single_chunk_counts))
        indices = list(compress(_PLACES, self.single_chunk_counts))
        total, first, head = self.total, self.first, self.phases.head
        for index, count in zip(indices, counts, strict=True):
            total.counts[COARSE[index]] += count
            first.counts[index] += count
            head.counts[index] += count
            recent.firsts[index] += count
            self.single_chunk_counts[index] = 0
        for times in (total, first, head):
            times.sum += self.single_chunk_secs
        self.single_chunk_secs = 0.0
        count = sum(counts)
        end = (self.model, 2, "completed")
        self.ends[end] = self.ends.get(end, 0) + count
        self.chunks += count
        recent.requests += count


OTHER: Final = "other"
MODEL_LABELS: Final = 1000
ADMIN_API: Final = "front"  # route label of everything that is not model traffic
LEGS: Final = ("prefill", "decode")
AT_ONCE: Final = 2048  # how many times are merged into a histogram in one call
UNREAD: Final = "unread"  # route label of requests without a readable head

K = TypeVar("K")


class Metrics:
    """All counts since the start of the program; series of removed workers are dropped."""

    def __init__(
        self,
        fleet: Fleet,
        recent: RecentWindow,
        clock: Callable[[], float] = monotonic,
        at_once: int = AT_ONCE,
    ) -> None:
        """`clock`: that of the event loop. `at_once`: the number of times that are
        merged into a histogram in one call."""
        self._clock = clock
        self._at_once = at_once
        self.failed_attempts: Counter[tuple[Worker, str]] = Counter()
        self.ejections: Counter[Worker] = Counter()
        self.health_changes: Counter[tuple[Worker, Health]] = Counter()
        self.exemplars = Exemplars()
        self.retries = 0
        self.alias_targets: Counter[tuple[str, str]] = Counter()  # requests by alias and target
        self.legs = {leg: Histogram(DURATION) for leg in LEGS}  # times of successful legs
        self.transfer_failures = 0  # of KV caches
        self.fallbacks: Counter[str] = Counter()  # by reason: the decode worker computed the prompt
        # Prompt tokens that were predicted to be cached, and that were, if responses report them.
        self.cached_tokens: dict[Worker, tuple[int, int]] = {}
        self._phases: dict[str, RoutePhases] = {}
        self._series: dict[str, dict[Worker | None, RouteSeries]] = {}
        self._fleet = fleet
        self._recent = recent
        self._members: list[Worker] = []
        self._models = fleet.models
        self._labels: set[str] = set()
        recent.gather = self.gather
        fleet.watch_members(self._follow_fleet)
        fleet.watch_ejected(self._ejected)
        fleet.watch_health(self._changed)

    @property
    def series(self) -> dict[tuple[str, Worker | None], RouteSeries]:
        """By route and worker, with everything that has ended."""
        self.gather(None)
        return {
            (route, worker): cell
            for route, cells in self._series.items()
            for worker, cell in cells.items()
        }

    @property
    def phases(self) -> dict[str, RoutePhases]:
        """By route, with everything that has ended."""
        self.gather(None)
        return self._phases

    @property
    def workers(self) -> list[Worker]:
        return self._fleet.workers

    def series_for(self, route: str, worker: Worker | None) -> RouteSeries:
        """The series of this route and worker, created if it does not exist."""
        cells = self._series.get(route)
        if cells is None:
            cells = self._series[route] = {}
        cell = cells.get(worker)
        if cell is None:
            cell = cells[worker] = RouteSeries(self.phases_for(route))
            self._recent.sums.setdefault(worker, WindowCounts())
        return cell

    def gap_histogram(self, exchange: Exchange) -> LateHistogram | None:
        """The histogram for the gaps of this stream while it runs; None if it has no route."""
        return (
            self.series_for(exchange.route.path, exchange.worker).between
            if exchange.route is not None
            else None
        )

    def count_target(self, alias: str, target: str) -> None:
        """Count a request for an alias that goes to this target. Both names are configured."""
        self.alias_targets[alias, target] += 1

    def count_cached(self, worker: Worker, predicted: int, reported: int) -> None:
        """Count prompt tokens of one response: those predicted to be cached, and those that the
        worker reported as cached."""
        before = self.cached_tokens.get(worker, (0, 0))
        self.cached_tokens[worker] = (before[0] + predicted, before[1] + reported)

    def note_trace(self, exchange: Exchange, worker: Worker | None) -> None:
        self.exemplars.note(exchange, worker, time())

    def record_prefill(self, exchange: Exchange, worker: Worker) -> None:
        """Count a prefill leg that succeeded. It counts in the last minute of its worker, but not
        as a request of the fleet."""
        times, started = self.legs["prefill"], exchange.started_at
        head_at, ended = exchange.response_head_at, exchange.ended_at
        index = bucket_of(FINE, head_at - started)
        duration_index = COARSE[index] if head_at == ended else bucket_of(DURATION, ended - started)
        times.counts[duration_index] += 1
        times.sum += ended - started
        sums = self._recent.sums
        try:
            slot = sums[worker]
        except KeyError:
            slot = sums[worker] = WindowCounts()
        slot.requests += 1
        slot.firsts[index] += 1

    def _count_legs(self, exchange: Exchange, legs: TwoLegs) -> None:
        self.transfer_failures += legs.transfer_failures
        if legs.fallback:
            self.fallbacks[legs.fallback] += 1
        if exchange.outcome == "completed" and exchange.sent_at:
            times, secs = self.legs["decode"], exchange.ended_at - exchange.sent_at
            times.counts[bucket_of(DURATION, secs)] += 1
            times.sum += secs

    def count_gaps(self, worker: Worker) -> int:
        """The number of gaps between chunks over all streams of the worker, also running ones."""
        return sum(sum(cell.between.counts) for cell in self.cells_of(worker))

    def cells_of(self, worker: Worker) -> list[RouteSeries]:
        """The worker's series of all routes; call `gather` first."""
        return [cells[worker] for cells in self._series.values() if worker in cells]

    def phases_for(self, route: str) -> RoutePhases:
        return self._phases.setdefault(route, RoutePhases())

    def gather(self, worker: Worker | None) -> None:
        """Merge deferred counts of this worker, or of all for None, into their histograms."""
        for cells in self._series.values():
            if worker is None:
                for cause, cell in cells.items():
                    self._gather(cause, cell)
            elif worker in cells:
                self._gather(worker, cells[worker])
        if worker is None:
            for phases in self._phases.values():
                phases.gather()

    def _gather(self, worker: Worker | None, cell: RouteSeries) -> None:
        if any(cell.single_chunk_counts):
            cell.gather(self._recent.sums[worker])

    def record(self, exchange: Exchange, worker: Worker | None) -> None:
        """Record an ended exchange; keeps no reference to it.

        The most frequent case comes first: a response in one chunk, to a request that was sent
        immediately. Then all its phases took equally long, except for a head that arrived earlier.
        """
        route = exchange.route
        if route is None:
            self._count_admin_api(exchange)
            return
        if exchange.legs is not None:
            self._count_legs(exchange, exchange.legs)
        try:
            cell = self._series[route.path][worker]
        except KeyError:
            cell = self.series_for(route.path, worker)
        ended, need = exchange.ended_at, exchange.requirements
        if (
            exchange.status != 200
            or exchange.last_chunk
            or need is None
            or not (exchange.single_chunk or _was_single_chunk(exchange))
            or (need.model != cell.model_key and not self._counts_for(cell, need.model))
        ):
            self._count_any(exchange, worker, cell)
            return
        secs = ended - exchange.started_at
        index = bucket_of(FINE, secs)
        if not exchange.single_chunk and exchange.response_head_at != ended:
            phases = cell.phases
            phases.head.counts[index] -= 1
            phases.head.sum -= secs
            phases.heads.append(exchange.response_head_at - exchange.started_at)
        cell.single_chunk_counts[index] += 1
        cell.single_chunk_secs += secs
        cell.bytes_in += exchange.bytes_in
        cell.bytes_out += exchange.bytes_out
        recent, proxy_secs, clock = self._recent, cell.phases.own, self._clock
        recent.single_chunk_counts[index] += 1
        if recent.completed_left or exchange.candidates is not None:
            recent.note_completed(exchange, worker)
        proxy_secs.append(exchange.own_secs + clock() - ended)
        if len(proxy_secs) >= self._at_once:
            cell.phases.gather()

    def _counts_for(self, cell: RouteSeries, requested: str | None) -> bool:
        """Whether a single-chunk response of this model may be added to the current counts."""
        model = self._label(requested)
        if model != cell.model:
            if any(cell.single_chunk_counts):
                return False
            cell.model = model
        if requested is None:
            cell.model_key = None
        else:  # one string for all cells, so that comparing it does not miss the CPU cache
            cell.model_key = intern(requested) if len(requested) <= TEXT_CHARS else NO_MODEL_SEEN
        return True

    def _label(self, model: str | None) -> str | None:
        """The metric label of a model. Only models of workers get one; their number is bounded,
        because adapters may be loaded and unloaded."""
        if model is None or model in self._labels:
            return model
        if model not in self._models or len(self._labels) >= MODEL_LABELS:
            return OTHER
        self._labels.add(model)
        return model

    def _count_any(self, exchange: Exchange, worker: Worker | None, cell: RouteSeries) -> None:
        end, ended = exchange.outcome or "cut_by_proxy", exchange.ended_at
        need = exchange.requirements
        model = self._label(need.model) if need is not None else None
        key = (model, exchange.status // 100, end)
        cell.ends[key] = cell.ends.get(key, 0) + 1
        cell.bytes_in += exchange.bytes_in
        cell.bytes_out += exchange.bytes_out
        cell.chunks += exchange.chunks
        secs = ended - exchange.started_at
        cell.total.counts[bucket_of(DURATION, secs)] += 1
        cell.total.sum += secs
        first, index = exchange.first_at, -1
        if first:
            secs = first - exchange.started_at
            index = bucket_of(FINE, secs)
            cell.first.counts[index] += 1
            cell.first.sum += secs
            if exchange.longest_gap and exchange.stream:
                cell.phases.longest_gap.observe(exchange.longest_gap)
        if exchange.sent_at:
            phases = cell.phases
            if exchange.response_head_at:
                phases.heads.append(exchange.response_head_at - exchange.sent_at)
            phases.own.append(exchange.own_secs + self._clock() - ended)
            if len(phases.own) >= self._at_once:
                phases.gather()
        if (
            exchange.queued_secs
            or exchange.connect_secs
            or exchange.last_chunk
            or exchange.failed_attempts is not None
        ):
            self._count_rarer(exchange, cell, model)
        self._count_recent(exchange, worker, index)

    def _count_recent(self, exchange: Exchange, worker: Worker | None, index: int) -> None:
        """`index`: bucket of FINE of the time to the client's first chunk; -1 without one."""
        recent = self._recent
        second = recent.second
        second.requests += 1
        slot = recent.sums[worker]
        slot.requests += 1
        if index >= 0:
            second.firsts[index] += 1
            if exchange.sent_at != exchange.started_at:  # the time before is not the worker's
                index = bucket_of(FINE, exchange.first_at - exchange.sent_at)
            slot.firsts[index] += 1
        if exchange.status >= 400 or exchange.outcome != "completed" or exchange.attempts > 1:
            recent.note_failed(exchange, worker, slot)
        elif recent.completed_left or exchange.candidates is not None:
            recent.note_completed(exchange, worker)

    def _count_admin_api(self, exchange: Exchange) -> None:
        cell = self.series_for(ADMIN_API if exchange.method != "-" else UNREAD, None)
        key = (None, exchange.status // 100, exchange.outcome or "cut_by_proxy")
        cell.ends[key] = cell.ends.get(key, 0) + 1
        cell.bytes_in += exchange.bytes_in
        cell.bytes_out += exchange.bytes_out

    def _count_rarer(self, exchange: Exchange, cell: RouteSeries, model: str | None) -> None:
        if exchange.queued_secs:
            cell.phases.queue.observe(exchange.queued_secs)
        if exchange.connect_secs:
            cell.phases.connect.observe(exchange.connect_secs)
        if exchange.failed_attempts:
            self.retries += exchange.attempts - 1
            for target, cause in exchange.failed_attempts:
                self.failed_attempts[target.worker, cause] += 1
        if exchange.last_chunk:
            for kind, count in tokens_in(exchange.last_chunk).items():
                cell.tokens[model, kind] += count
            cached = read_cached_tokens(exchange.last_chunk)
            if cached is not None:
                cell.cached_tokens += cached[0]
                cell.prompt_tokens += cached[1]

    def _ejected(self, worker: Worker) -> None:
        self.ejections[worker] += 1

    def _changed(self, worker: Worker, _: Health) -> None:
        self.health_changes[worker, worker.health.state] += 1

    def _follow_fleet(self) -> None:
        members = self._fleet.workers
        if members != self._members:
            self._members = members
            self.drop_removed_workers()
        if self._fleet.models is not self._models:
            self._models = self._fleet.models
            self._labels &= self._models if len(self._labels) < MODEL_LABELS else self._labels
            for cells in self._series.values():
                for cell in cells.values():
                    cell.model_key = NO_MODEL_SEEN

    def drop_removed_workers(self) -> None:
        """Drop the counts of workers that are not in the fleet. Not done only on removal, because
        an exchange may end after its worker was removed."""
        current = {*self._fleet.workers, None}
        for cells in self._series.values():
            for worker in cells.keys() - current:
                del cells[worker]
        self._recent.keep(current)
        self.exemplars.keep(current)
        for worker in self.cached_tokens.keys() - current:
            del self.cached_tokens[worker]
        _keep(self.failed_attempts, {key for key in self.failed_attempts if key[0] in current})
        _keep(self.health_changes, {key for key in self.health_changes if key[0] in current})
        _keep(self.ejections, {worker for worker in self.ejections if worker in current})


def _was_single_chunk(exchange: Exchange) -> bool:
    """As `exchange.single_chunk`, for an exchange that was run by a coroutine."""
    return (
        exchange.first_at == exchange.ended_at
        and exchange.sent_at == exchange.started_at
        and exchange.chunks == 1
        and exchange.attempts == 1
        and exchange.outcome == "completed"
    )


def _keep(counted: Counter[K], keys: set[K]) -> None:
    for key in counted.keys() - keys:
        del counted[key]


class SyncMetrics:
    """Weight syncs over a process group. `ended`: counts by phase and "ok" or "failed". `secs`: by
    phase. `aborts`: by cause. `nbytes`: bytes received by members, as reported, else as announced.
    Invariant: every label value is defined in the code; no text from a trainer becomes one."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        self.secs: dict[str, float] = {}
        self.aborts: Counter[str] = Counter()
        self.nbytes = 0

    def note(self, phase: str, secs: float, *, ok: bool) -> None:
        self.ended[phase, "ok" if ok else "failed"] += 1
        self.secs[phase] = self.secs.get(phase, 0.0) + secs
