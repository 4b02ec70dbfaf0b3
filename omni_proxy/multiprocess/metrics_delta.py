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
from omni_proxy.multiprocess.ipc import (
    HistogramDelta,
    MetricsEvent,
    RecentEndDelta,
    SeriesDelta,
    WindowDelta,
)
from omni_proxy.multiprocess.replicated_fleet import shared_ids
from omni_proxy.telemetry.histogram import DURATION, Exemplars, Histogram, LateHistogram, Noted
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
        open_streams = {key: of for key, of in self._between.items() if any(of.counts)}
        for route, worker in open_streams:
            self.series_for(route, worker)
        event = self._take_all()
        for between in open_streams.values():
            between.clear()
        return event

    def _take_all(self) -> MetricsEvent:
        cells, self._series = self.series, {}
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
            cells=[_series_delta(route, worker, cell) for (route, worker), cell in cells.items()],
            phases={
                route: _phase_deltas(phases_of_route) for route, phases_of_route in phases.items()
            },
            slots=recent.window_deltas(),
            ends=recent.end_deltas(),
            failed_attempts=[(_serial(w), cause, count) for (w, cause), count in failed.items()],
            retries=retries,
            alias_targets=[(*names, count) for names, count in targets.items()],
            legs={leg: _histogram_delta(times) for leg, times in legs.items() if any(times.counts)},
            transfer_failures=failures,
            fallbacks=dict(fallbacks),
            cached_tokens=[(_serial(worker), *counts) for worker, counts in cached.items()],
            worker_ends=_worker_counts(self._fleet.targets()),
            exemplars=[
                (route, _serial(worker), kind, *noted)
                for (route, worker), kind, noted in exemplars.rows()
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
        well = [RecentEndDelta(False, end) for end in self._ends]
        return well + [RecentEndDelta(True, end) for end in self._failures]


def merge_metrics(
    event: MetricsEvent, meters: Metrics, recent: RecentWindow, find: FindWorker
) -> None:
    """`find`: a worker by its serial number; metrics of a removed one are dropped."""
    for delta in event.cells:
        worker = find(delta.serial)
        if worker is not None or not delta.serial:
            _merge_series(delta, meters, worker)
    for route, deltas in event.phases.items():
        phases = meters.phases_for(route)
        for name, phase_delta in zip(PHASES, deltas, strict=True):
            _merge_histogram(getattr(phases, name), phase_delta)
    for serial, cause, count in event.failed_attempts:
        worker = find(serial)
        if worker is not None:
            meters.failed_attempts[worker, cause] += count
    meters.retries += event.retries
    for alias, target, count in event.alias_targets:
        meters.alias_targets[alias, target] += count
    _merge_legs(event, meters)
    _merge_cached_tokens(event, meters, find)
    _merge_recent(event, recent, find)
    _merge_exemplars(event, meters, find)
    for serial, traffic, routed, succeeded, failed in event.worker_ends:
        worker = find(serial)
        if worker is not None:
            worker.add_counts(traffic, routed=routed, succeeded=succeeded, failed=failed)


def _serial(worker: Worker | None) -> int:
    ids = shared_ids(worker) if worker is not None else None
    return ids[0] if ids is not None else 0


def _sparse(counts: list[int]) -> dict[int, int]:
    return {place: count for place, count in enumerate(counts) if count}


def _histogram_delta(of: Histogram) -> HistogramDelta:
    return HistogramDelta(_sparse(of.counts), of.sum)


def _series_delta(route: str, worker: Worker | None, cell: RouteSeries) -> SeriesDelta:
    return SeriesDelta(
        route=route,
        serial=_serial(worker),
        ends=[(*key, count) for key, count in cell.ends.items()],
        spreads=(
            _histogram_delta(cell.total),
            _histogram_delta(cell.first),
            _histogram_delta(cell.between),
        ),
        sums=tuple(getattr(cell, name) for name in SUMS),
        tokens=[(*key, count) for key, count in cell.tokens.items()],
    )


def _phase_deltas(phases: RoutePhases) -> list[HistogramDelta]:
    return [_histogram_delta(getattr(phases, name)) for name in PHASES]


def _worker_counts(workers: list[Worker]) -> list[tuple[int, str, int, int, int]]:
    rows = []
    for worker in workers:
        routed, succeeded, failed = worker.routed, worker.succeeded, worker.failed
        for traffic in {**routed, **succeeded, **failed}:
            ends = (succeeded.get(traffic, 0), failed.get(traffic, 0))
            rows.append((_serial(worker), traffic, routed.get(traffic, 0), *ends))
        worker.counts = zero_counters()
    return rows


def _merge_series(delta: SeriesDelta, meters: Metrics, worker: Worker | None) -> None:
    cell = meters.series_for(delta.route, worker)
    for model, hundreds, end, count in delta.ends:
        key = (model, hundreds, end)
        cell.ends[key] = cell.ends.get(key, 0) + count
    for histogram, spread in zip(
        (cell.total, cell.first, cell.between), delta.spreads, strict=True
    ):
        _merge_histogram(histogram, spread)
    for name, count in zip(SUMS, delta.sums, strict=True):
        setattr(cell, name, getattr(cell, name) + count)
    for model, kind, count in delta.tokens:
        cell.tokens[model, kind] += count


def _merge_histogram(of: Histogram, delta: HistogramDelta) -> None:
    for place, count in delta.places.items():
        of.counts[place] += count
    of.sum += delta.sum


def _merge_legs(event: MetricsEvent, meters: Metrics) -> None:
    for leg, delta in event.legs.items():
        _merge_histogram(meters.legs[leg], delta)
    meters.transfer_failures += event.transfer_failures
    meters.fallbacks.update(event.fallbacks)


def _merge_cached_tokens(event: MetricsEvent, meters: Metrics, find: FindWorker) -> None:
    for serial, predicted, reported in event.cached_tokens:
        worker = find(serial)
        if worker is not None:
            meters.count_cached(worker, predicted, reported)


def _merge_exemplars(event: MetricsEvent, meters: Metrics, find: FindWorker) -> None:
    for route, serial, kind, trace_id, secs, at in event.exemplars:
        worker = find(serial)
        if worker is not None or not serial:
            meters.exemplars.put((route, worker), kind, Noted(trace_id, secs, at))


def _merge_recent(event: MetricsEvent, recent: RecentWindow, find: FindWorker) -> None:
    for slot in event.slots:
        _merge_window(slot, recent, find)
    for noted in event.ends:
        recent.add_finished(noted.end, failed=noted.trouble)


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
    for place, count in delta.firsts.items():
        slot.firsts[place] += count
