"""Metrics of a data-plane process as deltas, which are merged into those of the main process.

Invariant: `take` resets the metrics that it returns, so each exchange is reported once; metrics
that a killed process has not sent (a fraction of a second) are lost. Both sides use the same series
and buckets, so the sums over all processes equal those of a single process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker, zero_counters
from omni_proxy.multiprocess.ipc.messages import (
    AliasTargetDelta,
    CachedTokensDelta,
    EndsDelta,
    ExemplarDelta,
    FailedAttemptsDelta,
    HistogramDelta,
    MetricsEvent,
    RecentEndDelta,
    SeriesDelta,
    TokensDelta,
    WindowDelta,
    WorkerCountsDelta,
)
from omni_proxy.multiprocess.replicated_fleet import shared_ids
from omni_proxy.telemetry.histogram import DURATION, Exemplars, Histogram, LateHistogram
from omni_proxy.telemetry.metrics import LEGS, Metrics, RoutePhases, RouteSeries
from omni_proxy.telemetry.recent_window import RecentWindow, WindowCounts

WHOLE_PROCESS = -1
SUMS = ("bytes_in", "bytes_out", "chunks", "cached_tokens", "prompt_tokens")
PHASES = ("queue", "connect", "head", "overhead", "longest_gap")

FindWorker = Callable[[int], Worker | None]


class MetricsDelta(Metrics):
    """Metrics whose contents are taken and sent at intervals."""

    def __init__(self, fleet: Fleet) -> None:
        self._between: dict[tuple[str, Worker | None], LateHistogram] = {}
        super().__init__(fleet, RecentDelta())

    def series_for(self, route: str, worker: Worker | None) -> RouteSeries:
        """The series for a route and worker. A running stream keeps the histogram with which it
        began, so that outlives the series."""
        cell = super().series_for(route, worker)
        cell.between = self._between.setdefault((route, worker), cell.between)
        return cell

    def drop_removed_workers(self) -> None:
        super().drop_removed_workers()
        here = {*self._fleet.workers, None}
        for key in [key for key in self._between if key[1] not in here]:
            del self._between[key]

    def take(self) -> MetricsEvent:
        open_streams = {
            key: between for key, between in self._between.items() if any(between.counts)
        }
        for route, worker in open_streams:
            self.series_for(route, worker)
        event = self._take_all()
        for between in open_streams.values():
            between.clear()
        return event

    def _take_all(self) -> MetricsEvent:
        series, self._series = self.series, {}
        phases, self._phases = self.phases, {}
        failed, self.failed_attempts = self.failed_attempts, Counter()
        retries, self.retries = self.retries, 0
        targets, self.alias_targets = self.alias_targets, Counter()
        legs, self.legs = self.legs, {leg: Histogram(DURATION) for leg in LEGS}
        failures, self.transfer_failures = self.transfer_failures, 0
        fallbacks, self.fallbacks = self.fallbacks, Counter()
        cached, self.cached_tokens = self.cached_tokens, {}
        exemplars, self.exemplars = self.exemplars, Exemplars()
        recent, self._recent = self._recent, RecentDelta()
        assert isinstance(recent, RecentDelta)
        return MetricsEvent(
            series=[_series_delta(route, worker, cell) for (route, worker), cell in series.items()],
            phases={
                route: _phase_deltas(phases_of_route) for route, phases_of_route in phases.items()
            },
            seconds=recent.window_deltas(),
            ends=recent.end_deltas(),
            failed_attempts=[
                FailedAttemptsDelta(_serial(worker), cause, count)
                for (worker, cause), count in failed.items()
            ],
            retries=retries,
            alias_targets=[AliasTargetDelta(*names, count) for names, count in targets.items()],
            legs={leg: _histogram_delta(times) for leg, times in legs.items() if any(times.counts)},
            transfer_failures=failures,
            fallbacks=dict(fallbacks),
            cached_tokens=[
                CachedTokensDelta(_serial(worker), *counts) for worker, counts in cached.items()
            ],
            worker_counts=_worker_counts(self._fleet.targets()),
            exemplars=[
                ExemplarDelta(route, _serial(worker), kind, exemplar)
                for (route, worker), kind, exemplar in exemplars.rows()
            ],
        )


class RecentDelta(RecentWindow):
    def window_deltas(self) -> list[WindowDelta]:
        second = self.current_second()
        if not second.requests and not any(slot.requests for slot in self.sums.values()):
            return []  # a prefill worker's slot may count a leg before its request ends
        slots = [(WHOLE_PROCESS, second)]
        slots += [(_serial(worker), slot) for worker, slot in self.sums.items()]
        return [
            WindowDelta(serial, slot.requests, slot.errors, _sparse(slot.firsts))
            for serial, slot in slots
        ]

    def end_deltas(self) -> list[RecentEndDelta]:
        completed = [RecentEndDelta(False, end) for end in self._ends]
        return completed + [RecentEndDelta(True, end) for end in self._failures]


def merge_metrics(
    event: MetricsEvent, meters: Metrics, recent: RecentWindow, find: FindWorker
) -> None:
    """`find`: a worker by its serial number; metrics of a removed one are dropped."""
    for delta in event.series:
        worker = find(delta.serial)
        if worker is not None or not delta.serial:
            _merge_series(delta, meters, worker)
    for route, deltas in event.phases.items():
        phases = meters.phases_for(route)
        for name, phase_delta in zip(PHASES, deltas, strict=True):
            _merge_histogram(getattr(phases, name), phase_delta)
    for attempts in event.failed_attempts:
        worker = find(attempts.serial)
        if worker is not None:
            meters.failed_attempts[worker, attempts.cause] += attempts.count
    meters.retries += event.retries
    for requests in event.alias_targets:
        meters.alias_targets[requests.alias, requests.target] += requests.count
    _merge_legs(event, meters)
    _merge_cached_tokens(event, meters, find)
    _merge_recent(event, recent, find)
    _merge_exemplars(event, meters, find)
    for counts in event.worker_counts:
        worker = find(counts.serial)
        if worker is not None:
            worker.add_counts(
                counts.traffic,
                routed=counts.routed,
                succeeded=counts.succeeded,
                failed=counts.failed,
            )


def _serial(worker: Worker | None) -> int:
    ids = shared_ids(worker) if worker is not None else None
    return ids[0] if ids is not None else 0


def _sparse(counts: list[int]) -> dict[int, int]:
    return {index: count for index, count in enumerate(counts) if count}


def _histogram_delta(histogram: Histogram) -> HistogramDelta:
    return HistogramDelta(_sparse(histogram.counts), histogram.sum)


def _series_delta(route: str, worker: Worker | None, cell: RouteSeries) -> SeriesDelta:
    return SeriesDelta(
        route=route,
        serial=_serial(worker),
        ends=[EndsDelta(*key, count) for key, count in cell.ends.items()],
        total=_histogram_delta(cell.total),
        first=_histogram_delta(cell.first),
        between=_histogram_delta(cell.between),
        sums=tuple(getattr(cell, name) for name in SUMS),
        tokens=[TokensDelta(*key, count) for key, count in cell.tokens.items()],
    )


def _phase_deltas(phases: RoutePhases) -> list[HistogramDelta]:
    return [_histogram_delta(getattr(phases, name)) for name in PHASES]


def _worker_counts(workers: list[Worker]) -> list[WorkerCountsDelta]:
    rows = []
    for worker in workers:
        routed, succeeded, failed = worker.routed, worker.succeeded, worker.failed
        for traffic in {**routed, **succeeded, **failed}:
            counts = (by_kind.get(traffic, 0) for by_kind in (routed, succeeded, failed))
            rows.append(WorkerCountsDelta(_serial(worker), traffic, *counts))
        worker.counts = zero_counters()
    return rows


def _merge_series(delta: SeriesDelta, meters: Metrics, worker: Worker | None) -> None:
    cell = meters.series_for(delta.route, worker)
    for end in delta.ends:
        key = (end.model, end.status_class, end.outcome)
        cell.ends[key] = cell.ends.get(key, 0) + end.count
    _merge_histogram(cell.total, delta.total)
    _merge_histogram(cell.first, delta.first)
    _merge_histogram(cell.between, delta.between)
    for name, count in zip(SUMS, delta.sums, strict=True):
        setattr(cell, name, getattr(cell, name) + count)
    for tokens in delta.tokens:
        cell.tokens[tokens.model, tokens.kind] += tokens.count


def _merge_histogram(histogram: Histogram, delta: HistogramDelta) -> None:
    for index, count in delta.bucket_counts.items():
        histogram.counts[index] += count
    histogram.sum += delta.sum


def _merge_legs(event: MetricsEvent, meters: Metrics) -> None:
    for leg, delta in event.legs.items():
        _merge_histogram(meters.legs[leg], delta)
    meters.transfer_failures += event.transfer_failures
    meters.fallbacks.update(event.fallbacks)


def _merge_cached_tokens(event: MetricsEvent, meters: Metrics, find: FindWorker) -> None:
    for delta in event.cached_tokens:
        worker = find(delta.serial)
        if worker is not None:
            meters.count_cached(worker, delta.predicted, delta.reported)


def _merge_exemplars(event: MetricsEvent, meters: Metrics, find: FindWorker) -> None:
    for delta in event.exemplars:
        worker = find(delta.serial)
        if worker is not None or not delta.serial:
            meters.exemplars.put((delta.route, worker), delta.kind, delta.exemplar)


def _merge_recent(event: MetricsEvent, recent: RecentWindow, find: FindWorker) -> None:
    for delta in event.seconds:
        _merge_window(delta, recent, find)
    for finished in event.ends:
        recent.add_finished(finished.end, failed=finished.failed)


def _merge_window(delta: WindowDelta, recent: RecentWindow, find: FindWorker) -> None:
    worker = find(delta.serial)
    if delta.serial == WHOLE_PROCESS:
        slot: WindowCounts = recent.second
    elif worker is None and delta.serial:
        return
    else:
        slot = recent.sums.setdefault(worker, WindowCounts())
    slot.requests += delta.requests
    slot.errors += delta.errors
    for index, count in delta.firsts.items():
        slot.firsts[index] += count
