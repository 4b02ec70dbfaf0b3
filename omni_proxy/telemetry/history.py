"""Time series of the last 15 minutes, hour and six hours, of the fleet and of each worker.

`HistorySampler` reads the fleet's counters into them, from the ticker. Invariants: memory is
bounded: POINTS points of each range for the fleet and for MAX_WORKERS workers. A point without a
sample has no value (None), never a zero. An event counts in the point in which the counters were
read. Requests pay nothing: each worker is read once per shortest point, a few in each step of the
ticker, so that the event loop is not blocked. Pure: the time is an argument, in Unix seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import compress, islice
from math import ceil, isnan, nan
from operator import add, sub
from typing import Final, NamedTuple

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.histogram import BETWEEN_CHUNKS, FINE, quantiles
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow, WindowCounts

POINTS: Final = 180
# Seconds per point, by the seconds of the whole range.
STEPS: Final = {900: 5, 3600: 20, 21600: 120}
MAX_WORKERS: Final = 512  # at most 30 KiB each, after six hours
SERIES: Final = (
    "requests_per_sec", "errors_per_sec", "in_flight", "waiting", "input_tokens_per_sec",
    "output_tokens_per_sec", "first_p50_ms", "first_p95_ms", "between_p50_ms", "between_p95_ms",
    "cache_hit_ratio",
)  # fmt: skip
# Series reported for each worker's last minute, in addition to `telemetry.recent_window`.
MINUTE_SERIES: Final = (
    "waiting", "input_tokens_per_sec", "output_tokens_per_sec", "between_p50_ms", "cache_hit_ratio",
)  # fmt: skip
MINUTE_RANGE: Final = 900
MINUTE_POINTS: Final = 12
_COUNTED: Final = (
    "requests", "errors", "input_tokens", "output_tokens", "prompt_tokens", "cached_tokens",
)  # fmt: skip


class WorkerTotals(NamedTuple):
    """Monotonic totals of one worker.

    `prompt_tokens`: only of responses that report how many of them were cached. `firsts`: first
    chunks by bucket of FINE. `gaps`: times between chunks by bucket of BETWEEN_CHUNKS. Both are
    empty if there are none.
    """

    requests: int = 0
    errors: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    firsts: Sequence[int] = ()
    gaps: Sequence[int] = ()


@dataclass(slots=True)
class Bin:
    """The running counts of a point. `secs`: the time that they cover."""

    requests: int = 0
    errors: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reports_tokens: bool = False  # some response has reported its tokens
    secs: float = 0.0
    in_flight: int = 0  # the sum over `samples`
    samples: int = 0
    waiting: float | None = None  # the highest
    firsts: dict[int, int] = field(default_factory=dict)  # by bucket
    gaps: dict[int, int] = field(default_factory=dict)

    def add(self, other: Bin) -> None:
        # Not a loop over the names: it runs for all workers every few seconds.
        self.requests += other.requests
        self.errors += other.errors
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.reports_tokens |= other.reports_tokens
        self.secs += other.secs
        self.in_flight += other.in_flight
        self.samples += other.samples
        if other.waiting is not None:
            self.waiting = max(self.waiting or 0.0, other.waiting)
        for sums, increase in ((self.firsts, other.firsts), (self.gaps, other.gaps)):
            if sums:
                for bucket, count in increase.items():
                    sums[bucket] = sums.get(bucket, 0) + count
            else:
                sums.update(increase)

    def values(self) -> tuple[float, ...]:
        """Values in the order of SERIES; nan if unknown."""
        token_secs = self.secs if self.reports_tokens else 0.0
        return (
            _share(self.requests, self.secs),
            _share(self.errors, self.secs),
            _share(self.in_flight, self.samples),
            nan if self.waiting is None else self.waiting,
            _share(self.input_tokens, token_secs),
            _share(self.output_tokens, token_secs),
            *_quantiles_ms(self.firsts, FINE),
            *_quantiles_ms(self.gaps, BETWEEN_CHUNKS),
            _share(self.cached_tokens, self.prompt_tokens),
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else nan


def _quantiles_ms(sparse: dict[int, int], bounds: tuple[float, ...]) -> tuple[float, float]:
    """The median and the 95th percentile; nan if there is nothing."""
    if not sparse:
        return nan, nan
    median, p95 = quantiles(sorted(sparse.items()), (0.5, 0.95), bounds)
    return median * 1000, p95 * 1000


class _Ring:
    """The points of one range. `slot`: number of the running point, counted from the Unix epoch.

    A row has the values of one point in the order of SERIES. Rows of ended points follow each other
    in one array, which grows until it has POINTS rows: with many workers, an array per series would
    cost a cache miss each.
    """

    __slots__ = ("_first", "_now", "_rows", "_step", "slot")

    def __init__(self, step: int) -> None:
        self._step = step
        self._rows = array("f")
        self._now = Bin()
        self.slot = -1
        self._first = 0  # the slot of the first row, before the array was full

    def add(self, at: float, counts: Bin) -> None:
        slot = int(at // self._step)
        if slot != self.slot:
            self._move(slot)
        self._now.add(counts)

    def read(self, name: str, at: float) -> list[float | None]:
        """POINTS values; the last one is of the point that contains `at`."""
        column = SERIES.index(name)
        newest = int(at // self._step)
        values = self._rows[column :: len(SERIES)]
        running = self._now.values()[column] if self._now.samples else nan
        oldest = self._oldest()
        points = []
        for slot in range(newest - POINTS + 1, newest + 1):
            value = nan
            if slot == self.slot:
                value = running
            elif oldest <= slot < self.slot:
                value = values[(slot - self._first) % POINTS]
            points.append(None if isnan(value) else float(f"{value:.4g}"))
        return points

    def mean(self, name: str, at: float, points: int) -> float | None:
        column = SERIES.index(name)
        oldest = max(int(at // self._step) - points, self._oldest())
        places = (self._place(slot) + column for slot in range(oldest, self.slot))
        values = [value for place in places if not isnan(value := self._rows[place])]
        return float(f"{sum(values) / len(values):.4g}") if values else None

    def _oldest(self) -> int:
        """The oldest slot that has a row."""
        return max(self._first, self.slot - POINTS + 1)

    def _place(self, slot: int) -> int:
        """The index of the first value of the slot's row."""
        return (slot - self._first) % POINTS * len(SERIES)

    def _move(self, slot: int) -> None:
        """Move to another point. All points are cleared if the clock was set back."""
        if 0 <= self.slot < slot < self.slot + POINTS:
            ended = array("f", self._now.values()) if self._now.samples else _EMPTY_ROW
            self._store(self.slot, ended)
            for missed in range(self.slot + 1, slot):
                self._store(missed, _EMPTY_ROW)
        else:
            self._first, self._rows = slot, array("f")
        self.slot, self._now = slot, Bin()

    def _store(self, slot: int, row: array[float]) -> None:
        place = self._place(slot)
        self._rows[place : place + len(SERIES)] = row  # appends it until the array is full


_EMPTY_ROW: Final = array("f", [nan]) * len(SERIES)


class Track:
    """All ranges of one worker, or of the fleet."""

    __slots__ = ("_before", "_last_at", "_rings")

    def __init__(self) -> None:
        self._rings = {secs: _Ring(step) for secs, step in STEPS.items()}
        self._before: WorkerTotals | None = None
        self._last_at = 0.0

    def sample(
        self, at: float, totals: WorkerTotals, in_flight: int, waiting: float | None = None
    ) -> Bin:
        """Add what was counted since the last sample to the series, and return it. The first sample
        counts nothing, because its totals may be old."""
        before, self._before = self._before, totals
        secs, self._last_at = at - self._last_at, at
        counts = Bin(in_flight=in_flight, samples=1, waiting=waiting)
        if before is not None and secs > 0:
            counts.secs = secs
            counts.reports_tokens = bool(totals.input_tokens or totals.output_tokens)
            for name in _COUNTED:
                # A total that fell was reset.
                setattr(counts, name, max(0, getattr(totals, name) - getattr(before, name)))
            counts.firsts = _increase(before.firsts, totals.firsts)
            counts.gaps = _increase(before.gaps, totals.gaps)
        self.add(at, counts)
        return counts

    def add(self, at: float, counts: Bin) -> None:
        for ring in self._rings.values():
            ring.add(at, counts)

    def read(self, secs: int, name: str, at: float) -> list[float | None]:
        """`secs` is a key of STEPS, `name` one of SERIES."""
        return self._rings[secs].read(name, at)

    def mean(self, secs: int, name: str, at: float, points: int) -> float | None:
        """The mean of the newest `points` points that have ended; None if none has a value."""
        return self._rings[secs].mean(name, at, points)


def _increase(before: Sequence[int], now: Sequence[int]) -> dict[int, int]:
    """What was added to each bucket, without those to which nothing was; a total that fell was
    reset."""
    if before == now:
        return {}
    added = list(map(sub, now, before)) if before else now
    buckets = zip(compress(range(len(now)), added), filter(None, added), strict=True)
    return {bucket: more for bucket, more in buckets if more > 0}


class History:
    """The tracks of the fleet and its workers. Call `sample_worker` every few seconds for each
    worker, and `end_second` once a second.

    `cluster`: the fleet's track over all proxies of a cluster, None without one. `peers`:
    requests in flight and waiting at the other proxies.
    """

    def __init__(self, max_workers: int = MAX_WORKERS) -> None:
        self._max_workers = max_workers
        self.fleet = Track()
        self.cluster: Track | None = None
        self.peers = (0, 0)
        self._unsent = Bin()  # counted here since `take_unsent`
        self.workers: dict[Worker, Track] = {}

    def end_second(
        self, at: float, counts: tuple[int, int, Sequence[int]], in_flight: int, waiting: int
    ) -> None:
        """`counts`: requests and errors of the fleet in this second, and its first chunks by bucket
        of FINE. A request in two legs is one request of the fleet and one of each worker."""
        requests, errors, firsts = counts
        second = Bin(
            requests, errors, secs=1.0, in_flight=in_flight, samples=1, waiting=float(waiting)
        )
        second.firsts = {bucket: count for bucket, count in enumerate(firsts) if count}
        self.fleet.add(at, second)
        if self.cluster is not None:
            self._unsent.add(second)
            second.in_flight += self.peers[0]
            second.waiting = float(waiting + self.peers[1])
            self.cluster.add(at, second)

    def sample_worker(
        self, at: float, worker: Worker, totals: WorkerTotals, waiting: float | None
    ) -> None:
        track = self.workers.get(worker)
        if track is None:
            if len(self.workers) >= self._max_workers:
                return
            track = self.workers[worker] = Track()
        counts = track.sample(at, totals, worker.in_flight, waiting)
        if not (counts.reports_tokens or counts.prompt_tokens or counts.gaps):
            return
        # Counts that `end_second` does not get, because they are counted only by worker.
        rest = Bin(
            input_tokens=counts.input_tokens, output_tokens=counts.output_tokens,
            prompt_tokens=counts.prompt_tokens, cached_tokens=counts.cached_tokens,
            reports_tokens=counts.reports_tokens,
        )  # fmt: skip
        rest.gaps = counts.gaps
        self.fleet.add(at, rest)
        if self.cluster is not None:
            self._unsent.add(rest)
            self.cluster.add(at, rest)

    def follow_cluster(self, *, member: bool) -> None:
        """Start or stop the track of the cluster. It starts as a copy of this proxy's own."""
        if member and self.cluster is None:
            self.cluster, self._unsent = deepcopy(self.fleet), Bin()
        elif not member:
            self.cluster, self.peers = None, (0, 0)

    def add_of_peer(self, at: float, counts: Bin) -> None:
        """Add what another proxy has counted."""
        if self.cluster is not None:
            # Time and samples are already counted here: all proxies count the same seconds.
            counts.secs = counts.samples = counts.in_flight = 0
            counts.waiting = None
            self.cluster.add(at, counts)

    def take_unsent(self) -> Bin:
        taken, self._unsent = self._unsent, Bin()
        return taken

    def minute_of(self, worker: Worker, at: float) -> dict[str, float | None]:
        """The means of MINUTE_SERIES over a worker's last minute; None if unknown."""
        track = self.workers.get(worker)
        if track is None:
            return dict.fromkeys(MINUTE_SERIES)
        return {name: track.mean(MINUTE_RANGE, name, at, MINUTE_POINTS) for name in MINUTE_SERIES}

    def keep(self, workers: Collection[Worker]) -> None:
        """Drop the tracks of all other workers."""
        for worker in self.workers.keys() - workers:
            del self.workers[worker]


def start_of(secs: int, at: float) -> int:
    """The Unix time of the first point of that range."""
    step = STEPS[secs]
    return (int(at // step) - POINTS + 1) * step


ROUND_SECS: Final = min(STEPS.values())
# The share of a round in which all workers are read, so that late steps still fall into the round.
BUSY_SHARE: Final = 0.9


class HistorySampler:
    """Call `step` 20 times a second, with the Unix time, and `end_second` with each second's
    counts."""

    def __init__(self, fleet: Fleet, metrics: Metrics, recent: RecentWindow) -> None:
        self.history = History()
        self._fleet = fleet
        self._metrics = metrics
        self._recent = recent
        self._round = 0.0
        self._next = 0  # index of the first worker that this round has not read

    def end_second(self, at: float, second: WindowCounts, in_flight: int, waiting: int) -> None:
        counts = (second.requests, second.errors, second.firsts)
        self.history.end_second(at, counts, in_flight, waiting)

    def step(self, at: float) -> None:
        workers = self._fleet.workers
        number, passed = divmod(at, ROUND_SECS)
        if number != self._round:
            self._round, self._next = number, 0
            self.history.keep(set(workers))
        due = min(len(workers), ceil(len(workers) * passed / (ROUND_SECS * BUSY_SHARE)))
        for worker in islice(workers, self._next, due):
            self.history.sample_worker(at, worker, self._totals(worker), self._waiting(worker))
        self._next = max(self._next, due)

    def _totals(self, worker: Worker) -> WorkerTotals:
        self._recent.gather(worker)
        recent = self._recent.sums.get(worker)
        cells = self._metrics.cells_of(worker)
        gaps: list[int] = []
        for cell in cells:
            counts = cell.between.counts
            gaps = list(map(add, gaps, counts)) if gaps else counts.copy()
        tokens = [item for cell in cells for item in cell.tokens.items()]
        return WorkerTotals(
            requests=recent.requests if recent is not None else 0,
            errors=recent.errors if recent is not None else 0,
            input_tokens=sum(count for (_, kind), count in tokens if kind == "input"),
            output_tokens=sum(count for (_, kind), count in tokens if kind == "output"),
            prompt_tokens=sum(cell.prompt_tokens for cell in cells),
            cached_tokens=sum(cell.cached_tokens for cell in cells),
            firsts=recent.firsts.copy() if recent is not None else (),
            gaps=gaps,
        )

    def _waiting(self, worker: Worker) -> float | None:
        """Requests in the queue of its engine, as it reported; None if unknown."""
        load = worker.engine_load
        if load is None or self._fleet.loads.is_stale(load):
            return None
        return load.report.waiting
