"""The pulse: once a second it closes the second that is over, and it feels how late it comes.

Invariant: it measures trio's loop as a task of it has it: what it waits beyond its time, all others
wait too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import trio

from omni_proxy.telemetry.histogram import SHORT, Histogram

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
