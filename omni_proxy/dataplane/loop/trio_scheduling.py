"""Detects when trio has work: runnable tasks, ready I/O or an expiring deadline.

A scheduling round of trio (a turn) costs as much as a request, so the event loop yields only when
needed. trio's instruments report runnable tasks, and its statistics deadlines. For ready I/O there
is no public interface: `_poll_trio_epoll` reads the private attribute
`trio._core._run.GLOBAL_RUN_CONTEXT.runner.io_manager._epoll`, and only polls it. Fallback: if a
version of trio lacks that attribute, `has_events` is always true and trio gets a turn every
millisecond, which is slower but correct. Invariant: nothing in trio is modified.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Final

import trio

MAX_TRIO_WAIT_SECS: Final = 0.05  # maximum between two turns of trio, whatever its statistics


class TrioActivity(trio.abc.Instrument):
    """The known work of trio. Create it in the event loop's own trio task.

    `waiting`: a task of trio can run. `next_deadline`: when trio's next deadline expires, by
    `clock`. It is an instrument because a query of trio in every iteration would be slow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loop_task = trio.lowlevel.current_task()
        self._io_poll = _poll_trio_epoll()
        self.next_deadline = 0.0
        self._turns_due = 0
        self.request_turn()

    def request_turn(self) -> None:
        """A task of trio can run. It needs two turns: trio collects its runnable tasks once per
        turn and runs them in random order. So a task that became runnable later, or is ordered
        after the event loop's task, is certain to have run only after the second turn."""
        self.waiting = True
        self._turns_due = 2

    def refresh(self) -> None:
        """Call it immediately after each turn of trio."""
        self.waiting = self._turns_due > 0
        self._turns_due -= self.waiting
        secs = trio.lowlevel.current_statistics().seconds_to_next_deadline
        self.next_deadline = self._clock() + min(secs, MAX_TRIO_WAIT_SECS)

    def has_events(self) -> bool:
        """Whether a socket, a thread or a signal has an event for trio. Always true if that can't
        be detected."""
        return self._io_poll is None or bool(self._io_poll.poll(0))

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        if task is not self._loop_task:
            self.request_turn()


def _poll_trio_epoll() -> select.poll | None:
    """A poll object for trio's epoll set, a private attribute of trio; None if it is missing."""
    context = getattr(getattr(trio._core, "_run", None), "GLOBAL_RUN_CONTEXT", None)
    manager = getattr(getattr(context, "runner", None), "io_manager", None)
    trio_epoll = getattr(manager, "_epoll", None)
    if not isinstance(trio_epoll, select.epoll):
        return None
    poll = select.poll()
    poll.register(trio_epoll.fileno(), select.POLLIN)
    return poll
