"""All instruments of the running process as one value, the stall detector, and the ticker.

The ticker measures the delay of trio's loop: if it wakes late, all other tasks wake late too. The
stall detector finds workers that have requests in flight and send nothing, long before their probes
fail. Invariant: it is pure, its memory is bounded by the fleet, and each tick visits a fifth of the
workers. Progress is an exchange that ends or a further chunk of a stream; WebSocket sessions for
speech don't count, because they may be silent for any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

import trio

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import FAILED, ROUTED, SUCCEEDED, Worker, counter_offset
from omni_proxy.telemetry.histogram import SHORT, Histogram, quantile
from omni_proxy.telemetry.history import HistorySampler
from omni_proxy.telemetry.line_log import LineLog
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from omni_proxy.telemetry.span_exporter import SpanExporter

PARTS: Final = 5  # each tick checks one part, so each worker is checked every five seconds
LEAST_SECS: Final = 15.0
USUAL_TIMES: Final = 3.0  # factor over the worker's usual time to the first chunk
MOST: Final = 0.95  # quantile that counts as usual: earlier stalls must not raise it
UNKNOWN_SECS: Final = 60.0  # for a worker that has sent no response so far
SESSIONS: Final = "tts_websocket"


class EngineStallDetector:
    """Call `tick` once a second, with the Unix time."""

    def __init__(self, fleet: Fleet, meters: Metrics, recent: RecentWindow) -> None:
        self._fleet = fleet
        self._meters = meters
        self._recent = recent
        self._part = 0
        # Progress at the last check, and the time since which it has not changed.
        self._progress: dict[Worker, tuple[int, float]] = {}

    def tick(self, at: float) -> None:
        workers = self._fleet.workers
        self._part = (self._part + 1) % PARTS
        for worker in islice(workers, self._part, None, PARTS):
            progress = self._count_progress(worker)
            if not _busy(worker):
                self._progress.pop(worker, None)
            elif worker not in self._progress or self._progress[worker][0] != progress:
                self._progress[worker] = progress, at
        if len(self._progress) > len(workers):
            current = set(workers)
            self._progress = {
                watched: progress
                for watched, progress in self._progress.items()
                if watched in current
            }

    def silent_secs(self, worker: Worker, at: float) -> float | None:
        """Seconds without progress, if that is unusually long for this worker, else None."""
        if worker not in self._progress or not _busy(worker):
            return None
        progress, since = self._progress[worker]
        secs = at - since
        if secs < LEAST_SECS or progress != self._count_progress(worker):
            return None
        return round(secs, 1) if secs >= self._usual(worker) else None

    def _usual(self, worker: Worker) -> float:
        self._recent.gather(worker)
        slot = self._recent.sums.get(worker)
        usual = quantile(slot.firsts, MOST) if slot is not None else None
        return UNKNOWN_SECS if usual is None else USUAL_TIMES * usual

    def _count_progress(self, worker: Worker) -> int:
        ended = sum(worker.succeeded.values()) + sum(worker.failed.values())
        return ended + self._meters.count_gaps(worker)


class HoldTimes:
    """The times at which workers were cordoned, by reason. Call `tick` once a second, with the Unix
    time. Bounded by the fleet; a cordon from before the start counts from its first second."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._since: dict[Worker, dict[str, float]] = {}

    def tick(self, at: float) -> None:
        before, self._since = self._since, {}
        for worker in self._fleet.workers:
            if worker.cordon_reasons:
                known = before.get(worker, {})
                self._since[worker] = {name: known.get(name, at) for name in worker.cordon_reasons}

    def of(self, worker: Worker) -> dict[str, float]:
        """Unix times by reason; a cordon of the last second may be missing."""
        since = self._since.get(worker, {})
        return {name: since[name] for name in sorted(worker.cordon_reasons & since.keys())}


def _busy(worker: Worker) -> bool:
    in_flight = worker.in_flight - worker.in_flight_elsewhere
    if not in_flight:
        return False
    routed, succeeded, failed = (
        worker.counts[counter_offset(SESSIONS) + kind] for kind in (ROUTED, SUCCEEDED, FAILED)
    )
    return in_flight > routed - succeeded - failed


class Instruments:
    """`load()` returns the numbers of requests in flight and waiting."""

    def __init__(
        self, fleet: Fleet, load: Callable[[], tuple[int, int]], logs: Mapping[str, LineLog]
    ) -> None:
        self.recent = RecentWindow()
        self.metrics = Metrics(fleet, self.recent)
        self.stall_detector = EngineStallDetector(fleet, self.metrics, self.recent)
        self.holds = HoldTimes(fleet)
        self.history_sampler = HistorySampler(fleet, self.metrics, self.recent)
        self.history = self.history_sampler.history
        self.ticker = Ticker(self._on_second, self.history_sampler.step)
        self.logs = logs
        self.spans = SpanExporter()
        self._load = load

    def _on_second(self, at: float) -> None:
        in_flight, waiting = self._load()
        second = self.recent.tick(at, in_flight, waiting)
        self.history_sampler.end_second(at, second, in_flight, waiting)
        self.stall_detector.tick(at)
        self.holds.tick(at)


STEP_SECS: Final = 0.05  # shorter stalls are not detected
STEPS: Final = 20  # in a second


class Ticker:
    """Calls `on_step(unix_time)` STEPS times a second and `on_second(unix_time)` after the last of
    them; `lag` has the delay of each step."""

    def __init__(
        self, on_second: Callable[[float], None], on_step: Callable[[float], None]
    ) -> None:
        self.lag = Histogram(SHORT)
        self.worst_secs = 0.0  # the longest delay of the last second
        self._on_second = on_second
        self._on_step = on_step

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            worst = 0.0
            for _ in range(STEPS):
                due = trio.current_time() + STEP_SECS
                await trio.sleep_until(due)
                late = trio.current_time() - due
                self.lag.observe(late)
                worst = max(worst, late)
                self._on_step(time.time())
            self.worst_secs = worst
            self._on_second(time.time())
