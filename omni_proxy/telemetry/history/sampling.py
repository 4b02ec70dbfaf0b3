"""Samples the counters of the fleet into its history, driven by the ticker.

Invariant: it adds no work to requests. Each worker is read once in each point of the shortest
range, a few in each step of the ticker, so that no step takes long.
"""

from __future__ import annotations

from itertools import islice
from math import ceil
from operator import add
from typing import Final

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.history.rings import STEPS, History, WorkerTotals
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow, WindowCounts

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
