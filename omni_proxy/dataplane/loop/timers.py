"""Timeouts of connection tasks: phase deadlines, checked in sweeps, and exact sleeps for back-off.

A phase deadline is one float of the task. Every `SWEEP_SECS` a sweep over all tasks throws
`PhaseTimeout` into those that are past it, so a deadline is late by at most that. `Timers` is for
sleeps shorter than a sweep: one trio task sleeps until the earliest end, or for ever while no task
sleeps. Invariant: a sleep ends no earlier than requested and at most one scheduling round of trio
later; if an exception is thrown into a sleeping task, its timer does not step it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Final

import trio

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.task import ConnectionTask, pause

SWEEP_SECS: Final = 0.25


def expire_tasks(loop: EventLoop) -> None:
    """One sweep. It reads the clock, because `loop.now` is as old as the last iteration."""
    loop.now = now = loop.clock()
    for task in [task for task in loop.tasks if task.phase_deadline < now]:
        task.on_phase_timeout()
    loop.flush()


async def run_sweeps(loop: EventLoop, *chores: Callable[[], None]) -> None:
    """Sweep until cancelled. `chores`: called after each sweep (idle upstream connections, paused
    listeners)."""
    while True:
        await trio.sleep(SWEEP_SECS)
        expire_tasks(loop)
        for chore in chores:
            chore()
        loop.flush()


class _Sleep:
    """One sleep of a task. `task`: None once it has ended; it stays in the heap until its time."""

    __slots__ = ("ends_at", "number", "task")

    def __init__(self, ends_at: float, number: int, task: ConnectionTask) -> None:
        self.ends_at = ends_at
        self.number = number  # orders sleeps that end at the same time by their start
        self.task: ConnectionTask | None = task

    def __lt__(self, other: _Sleep) -> bool:
        return (self.ends_at, self.number) < (other.ends_at, other.number)


class Timers:
    """Sleeps of connection tasks. Times are of trio's clock."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._heap: list[_Sleep] = []
        self._started = 0
        self._scope = trio.CancelScope()

    async def sleep(self, task: ConnectionTask, secs: float) -> None:
        """Call it from `task` itself. Raises any exception that is thrown into the task."""
        self._started += 1
        sleep = _Sleep(trio.current_time() + secs, self._started, task)
        heappush(self._heap, sleep)
        if sleep.ends_at < self._scope.deadline:
            self._scope.deadline = sleep.ends_at
            self._loop.request_trio_turn()
        try:
            while sleep.task is not None:
                task.waiting_on = sleep
                await pause
        finally:
            sleep.task = None

    async def run(self) -> None:
        """Step the tasks whose sleep has ended, until cancelled."""
        while True:
            self._step_due()
            # No other task of trio runs between here and the sleep, so no new one can be missed.
            self._scope = trio.CancelScope(deadline=self._heap[0].ends_at if self._heap else inf)
            with self._scope:
                await trio.sleep_forever()

    def _step_due(self) -> None:
        """Step due tasks directly, as a sweep does: stepping one may end the sleep of another."""
        heap, now = self._heap, trio.current_time()
        while heap and (heap[0].task is None or heap[0].ends_at <= now):
            sleep = heappop(heap)
            task, sleep.task = sleep.task, None
            if task is not None:
                self._loop.now = self._loop.clock()
                task.step()
        self._loop.flush()
