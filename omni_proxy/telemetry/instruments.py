"""All that the running program is watched with, as one value to hand around."""

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
    """`load` tells how many requests are in flight, and how many wait."""

    def __init__(
        self, fleet: Fleet, load: Callable[[], tuple[int, int]], logs: Mapping[str, LineLog]
    ) -> None:
        self.recent = RecentWindow()
        self.metrics = Metrics(fleet, self.recent)
        self.stall_detector = EngineStallDetector(fleet, self.metrics, self.recent)
        self.ticker = Ticker(self._beat)
        self.logs = logs
        self._load = load

    def _beat(self, at: float) -> None:
        self.recent.tick(at, *self._load())
        self.stall_detector.tick(at)


# The pulse: once a second it closes the second that is over, and it feels how late it comes.
#
# Invariant: it measures trio's loop as a task of it has it: what it waits beyond its time, all others
# wait too.

STEP_SECS: Final = 0.05  # a short stall between two looks is not seen
STEPS: Final = 20  # to a second


class Ticker:
    """`beat` is called once a second, with the Unix time; `lag` holds what each step was late."""

    def __init__(self, beat: Callable[[float], None]) -> None:
        self.lag = Histogram(SHORT)
        self.worst_secs = 0.0  # of the last whole second
        self._beat = beat

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
            self._beat(time.time())
