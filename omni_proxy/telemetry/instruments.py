"""All instruments of the running process as one value, and the ticker that drives them.

Invariant: the ticker measures trio's loop as its tasks have it: by what it wakes late, all other
tasks wake late too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import trio

from omni_proxy.fleet.registry import Fleet
from omni_proxy.telemetry.histogram import SHORT, Histogram
from omni_proxy.telemetry.line_log import LineLog
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from omni_proxy.telemetry.stall_detector import EngineStallDetector


class Instruments:
    """`load()` returns the numbers of requests in flight and waiting."""

    def __init__(
        self, fleet: Fleet, load: Callable[[], tuple[int, int]], logs: Mapping[str, LineLog]
    ) -> None:
        self.recent = RecentWindow()
        self.metrics = Metrics(fleet, self.recent)
        self.stall_detector = EngineStallDetector(fleet, self.metrics, self.recent)
        self.ticker = Ticker(self._on_second)
        self.logs = logs
        self._load = load

    def _on_second(self, at: float) -> None:
        self.recent.tick(at, *self._load())
        self.stall_detector.tick(at)


STEP_SECS: Final = 0.05  # a shorter stall is not seen
STEPS: Final = 20  # in a second


class Ticker:
    """Calls `on_second(unix_time)` once a second; `lag` has the delay of each step."""

    def __init__(self, on_second: Callable[[float], None]) -> None:
        self.lag = Histogram(SHORT)
        self.worst_secs = 0.0  # the longest delay of the last second
        self._on_second = on_second

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
            self.worst_secs = worst
            self._on_second(time.time())
