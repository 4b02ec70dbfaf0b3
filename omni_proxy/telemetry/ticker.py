"""The ticker: the clock of the recent window and of the charts, and the delay of trio's loop.

If the ticker wakes late, all other tasks wake late too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import trio

from omni_proxy.telemetry.histogram import SHORT, Histogram

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
