"""What trio's other tasks need of the pump: whether one can run, has news, or will be due.

Contract: a turn of trio takes 100 us where everything is cold, so it is given when somebody has a
use for it. Nothing of trio is changed here. Where trio keeps its epoll set elsewhere than we know,
`has_events` is always true: then it gets its turns blindly.
"""

from __future__ import annotations

import select
from time import monotonic
from typing import Final

import trio

AT_LEAST_SECS: Final = 0.05  # a turn comes then in any case, whatever we have not thought of


class HostLoop(trio.abc.Instrument):
    """Made in the pump's own task. `waiting`: one of them can run; `next_deadline`: when one will, by the
    monotonic clock.

    It is told, for to ask trio at every turn of the pump takes 3 us.
    """

    def __init__(self) -> None:
        self._loop_task = trio.lowlevel.current_task()
        self._sockets = _sockets_of_trio()
        self.next_deadline = 0.0
        self._owed = 0
        self.request_turn()

    def request_turn(self) -> None:
        """Somebody can run. Trio takes up in one turn who is ready, then runs them in any order:
        who came behind the taking up, and behind us in that order, has run after two turns."""
        self.waiting = True
        self._owed = 2

    def refresh(self) -> None:
        """Call it right behind each turn that trio had."""
        self.waiting = self._owed > 0
        self._owed -= self.waiting
        secs = trio.lowlevel.current_statistics().seconds_to_next_deadline
        self.next_deadline = monotonic() + min(secs, AT_LEAST_SECS)

    def has_events(self) -> bool:
        """Whether a socket, a thread or a signal has something for trio. Takes half a us."""
        return self._sockets is None or bool(self._sockets.poll(0))

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        if task is not self._loop_task:
            self.request_turn()


def _sockets_of_trio() -> select.poll | None:
    """trio tells nobody what it waits on."""
    context = getattr(getattr(trio._core, "_run", None), "GLOBAL_RUN_CONTEXT", None)
    manager = getattr(getattr(context, "runner", None), "io_manager", None)
    found = getattr(manager, "_epoll", None)
    if not isinstance(found, select.epoll):
        return None
    look = select.poll()
    look.register(found.fileno(), select.POLLIN)
    return look
