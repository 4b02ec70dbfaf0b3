"""Child processes that have imported everything and wait: who joins a group never waits for that.

A child that left its group in good order comes back here; one that did not is ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from omni_proxy.collective.process import Child
from omni_proxy.collective.specs import GroupError
from omni_proxy.collective.wires import Forget

MOST_IDLE: Final = 2
# An import of torch takes one or two; on a machine at its limits many more.
START_SECS: Final = 60.0
REAP_SECS: Final = 5.0


class Spares:
    """Idle children. Every method is safe from any thread and returns at once but `close`."""

    def __init__(self, start: Callable[[], Child]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._all: list[Child] = []
        self._closed = False

    def warm(self) -> None:
        """Sees to it that one is there or on its way."""
        with self._lock:
            self._sort()
            if not self._idle and not self._closed:
                self._idle.append(self._begun())

    def take(self) -> Child:
        """The one that is ready, or will be first. Raises GroupError where none can be started."""
        with self._lock:
            if self._closed:
                raise GroupError("the receiver is shutting down")
            self._sort()
            self._idle.sort(key=lambda child: not child.ready)
            return self._idle.pop(0) if self._idle else self._begun()

    def give(self, child: Child) -> None:
        """Takes one back that is in no group and has no thread inside torch."""
        child.tell(Forget())
        with self._lock:
            self._sort()
            if len(self._idle) < MOST_IDLE and not self._closed and child.why is None:
                self._idle.append(child)
                return
        child.kill("no longer needed")

    def forget(self, blocks: tuple[int, ...]) -> None:
        for child in self.living():
            child.tell(Forget(blocks))

    def living(self) -> list[Child]:
        with self._lock:
            self._sort()
            return list(self._all)

    def close(self) -> None:
        """Ends all, those in use too; returns once they are reaped."""
        with self._lock:
            self._closed = True
            everyone, self._all, self._idle = self._all, [], []
        for child in everyone:
            child.kill("the receiver was closed")
        for child in everyone:
            child.reaped(REAP_SECS)

    def _begun(self) -> Child:
        child = self._start()
        self._all.append(child)
        return child

    def _sort(self) -> None:
        self._idle = [child for child in self._idle if child.why is None]
        self._all = [child for child in self._all if not child.reaped(0)]
