"""The child processes of one receiver: forked when they are wanted, each for one group.

Nobody waits for an import where the nest is warm; a fork is there within milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from omni_proxy.process_group.child_handle import ChildHandle
from omni_proxy.process_group.forkserver_client import ForkServer
from omni_proxy.process_group.ipc import Forget
from omni_proxy.process_group.tensor_plan import GroupError

# An import of torch takes one or two; on a machine at its limits many more.
START_SECS: Final = 60.0
REAP_SECS: Final = 5.0


class Children:
    """`start` gives one out of the nest, which is held until `close`. Safe from any thread."""

    def __init__(self, nest: ForkServer, start: Callable[[ForkServer], ChildHandle]) -> None:
        self._nest = nest
        self._start = start
        self._lock = threading.Lock()
        self._all: list[ChildHandle] = []
        self._closed = False
        nest.hold()

    def warm(self) -> None:
        """Sees to it that the nest is there or on its way. Raises GroupError where it cannot be."""
        with self._lock:
            if not self._closed:
                self._nest.warm()

    def take(self) -> ChildHandle:
        """A new one. Raises GroupError where none can be started."""
        with self._lock:
            if self._closed:
                raise GroupError("the receiver is shutting down")
            self._sort()
            child = self._start(self._nest)
            self._all.append(child)
            return child

    def forget(self, blocks: tuple[int, ...]) -> None:
        for child in self.living():
            child.tell(Forget(blocks))

    def living(self) -> list[ChildHandle]:
        with self._lock:
            self._sort()
            return list(self._all)

    def pids(self) -> list[int]:
        """The nest's first, where it is there."""
        found = [self._nest.pid(), *(child.pid for child in self.living())]
        return [pid for pid in found if pid is not None]

    def close(self) -> None:
        """Ends all; returns once they are reaped, and the nest where nobody else holds it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            everyone, self._all = self._all, []
        for child in everyone:
            child.kill("the receiver was closed")
        until = time.monotonic() + REAP_SECS
        for child in everyone:
            child.reaped(max(until - time.monotonic(), 0))
        self._nest.release()

    def _sort(self) -> None:
        self._all = [child for child in self._all if not child.reaped(0)]
