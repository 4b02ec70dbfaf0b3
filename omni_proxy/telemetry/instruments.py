"""All instruments of the running process as one value, the ticker that drives them, and when
workers were cordoned.

The ticker closes each second of the recent window and of the charts, and measures the delay of
trio's loop: if it wakes late, all other tasks wake late too. Must not count requests itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import trio

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.histogram import SHORT, Histogram
from omni_proxy.telemetry.history import HistorySampler
from omni_proxy.telemetry.line_log import LineLog
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from omni_proxy.telemetry.span_exporter import SpanExporter
from omni_proxy.telemetry.stall_detector import EngineStallDetector

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
        self.ticker = Ticker(self.end_second, self.history_sampler.step)
        self.logs = logs
        self.spans = SpanExporter()
        self._load = load

    def end_second(self, at: float) -> None:
        """The ticker calls it after each second, and `history_sampler.step` during it. `at`: Unix
        time."""
        in_flight, waiting = self._load()
        second = self.recent.tick(at, in_flight, waiting)
        self.history_sampler.end_second(at, second, in_flight, waiting)
        self.stall_detector.tick(at)
        self.holds.tick(at)
