"""A transfer under way: in a thread of this process, or in a child that tells of it.

posting -> armed -> done | failed. Invariant: it ends by itself, also if nobody ever asks: by its
last byte, its peer's death, a standstill, a deadline or an abort. The first word is the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from omni_proxy.collective.armed import Order, Progress
from omni_proxy.collective.receive import Moved
from omni_proxy.collective.specs import GroupError

T = TypeVar("T")

# How long an aborted transfer may take to notice: a few ticks of its watch, or a child's death.
ENDING_SECS: Final = 5.0


class Underway(Generic[T]):
    """`stop(why)` has to make the transfer end soon, and somebody then call `finish` or `fail`."""

    def __init__(self, order: Order, stop: Callable[[str], None]) -> None:
        self.order = order
        self._stop = stop
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._grown = threading.Condition()
        self._progress = order.progress(0, 0)
        self._result: T | None = None
        self._fault: GroupError | None = None

    def progress(self) -> Progress:
        return self._progress

    def fault(self) -> GroupError | None:
        # Each time a new one: a traceback would keep the frames of whoever raised it last.
        known = self._fault
        return known and GroupError(str(known), group_dropped=known.group_dropped)

    def wait(self, secs: float) -> T:
        if not self._ended.wait(secs):
            self.abort(f"not complete within {secs:g} s")
        if (fault := self.fault()) is not None:
            raise fault
        assert self._result is not None
        return self._result

    def abort(self, why: str) -> None:
        if self._ended.is_set():
            return
        self._stop(why)
        if not self._ended.wait(ENDING_SECS):
            self.fail(GroupError(why, group_dropped=True))

    def ended(self, within_secs: float) -> bool:
        return self._ended.wait(within_secs)

    def moved_past(self, buckets: int, secs: float) -> Progress:
        """How far it is once more than `buckets` are done, or it has ended, or `secs` are over."""
        with self._grown:
            self._grown.wait_for(
                lambda: self._progress.buckets_done > buckets or self._ended.is_set(), secs
            )
        return self._progress

    def moved(self, messages_done: int, bytes_come: int) -> None:
        before, self._progress = self._progress, self.order.progress(messages_done, bytes_come)
        if self._progress.buckets_done > before.buckets_done:
            self._tell()

    def finish(self, result: T) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._progress = self.order.progress(*self.order.all)
                self._result = result
                self._ended.set()
        self._tell()

    def fail(self, error: GroupError) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._fault = GroupError(str(error), group_dropped=error.group_dropped)
                self._ended.set()
        self._tell()

    def _tell(self) -> None:
        with self._grown:
            self._grown.notify_all()


def run_underway(
    name: str,
    underway: Underway[T],
    transfer: Callable[[threading.Event, Moved], T],
    ready_secs: float,
) -> None:
    """Starts a transfer in a watching thread; returns once it is armed.

    `transfer` sets the event as soon as the peer may send. Raises GroupError: it is disarmed then.
    """
    posted = threading.Event()
    box = [transfer]

    def run() -> None:
        try:
            underway.finish(box.pop()(posted, underway.moved))
        except GroupError as error:
            underway.fail(error)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            underway.fail(GroupError(f"{type(error).__name__}: {error}", group_dropped=True))
        posted.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    if not posted.wait(ready_secs):
        underway.abort(f"not armed within {ready_secs:g} s")
    if (fault := underway.fault()) is not None:
        raise fault
