"""Virtual time for objects of the data plane: an event loop and timers driven by a simulation.

Invariant: nothing waits in real time and no sockets are opened; callbacks for the same time run in
the order in which they were scheduled, so equal input gives equal results.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.task import ConnectionTask, pause
from omni_proxy.dataplane.loop.timers import Timers


class VirtualTime:
    """The clock and the scheduled events. Times are seconds from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0

    def clock(self) -> float:
        return self.now

    def schedule(self, due: float, callback: Callable[[Any], None], argument: Any) -> None:
        """Call `callback(argument)` at `due`, or now if `due` is in the past."""
        self._scheduled += 1
        heappush(self._events, (max(due, self.now), self._scheduled, callback, argument))

    def advance(self) -> bool:
        """Run the next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, callback, argument = heappop(self._events)
        callback(argument)
        return True


class VirtualLoop(EventLoop):
    """Steps tasks in virtual time; `run` is not used."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(time.clock)
        self._time = time

    def step_ready(self) -> None:
        """Step woken tasks until no task is woken any more."""
        self.now = self._time.now
        while self._ready:
            ready, self._ready = self._ready, []
            for task in ready:
                task.step()

    def close(self) -> None:
        for task in list(self.tasks):
            task.close_coroutine()
        self._epoll.close()


class VirtualTimers(Timers):
    """Sleeps of tasks in virtual time."""

    def __init__(self, loop: EventLoop, time: VirtualTime) -> None:
        super().__init__(loop)
        self._time = time
        self._tasks = loop

    async def sleep(self, task: ConnectionTask, secs: float) -> None:
        over: list[bool] = []

        def end(_: object) -> None:
            over.append(True)
            self._tasks.wake(task)

        self._time.schedule(self._time.now + secs, end, None)
        while not over:
            task.waiting_on = over
            await pause
