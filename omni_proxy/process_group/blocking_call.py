"""Blocking calls that nothing can interrupt, each in a daemon thread of its own.

Whoever waits for one may give it up: the thread then stays until torch lets it go, is counted
here, and drops whatever it made by itself (a group's destructor blocks like the group did). No
object that a blocked thread made is ever freed in the thread of the one who gave up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from omni_proxy.process_group.tensor_plan import GroupError

T = TypeVar("T")

TICK_SECS: Final = 0.02
DROP_SECS: Final = 2.0


class BlockingCall(Generic[T]):
    """One call under way. `step` and `done` are written by its thread and read by anyone."""

    def __init__(self, name: str, call: Callable[[BlockingCall[T]], T]) -> None:
        self.step = ""
        self.done = 0
        self.abandoned = False
        self._call: Callable[[BlockingCall[T]], T] | None = call
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._result: T | None = None
        self._fault: str | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        result, fault = None, None
        try:
            result = call(self)
        except Exception as error:
            # The text alone: the traceback's frames would keep the group alive elsewhere.
            fault = str(error) or type(error).__name__
        del call
        with self._lock:
            if not self.abandoned:
                self._result, self._fault = result, fault
            self._ended.set()

    def ended(self, within_secs: float) -> bool:
        return self._ended.wait(within_secs)

    def take(self) -> T:
        """What the ended call returned; raises GroupError with what it raised."""
        result, self._result = self._result, None
        if self._fault is not None:
            raise GroupError(self._fault)
        return result  # type: ignore[return-value]  # T may be None, and then so is it

    def abandon(self) -> bool:
        """Whether it was given up; False if it has ended after all."""
        with self._lock:
            self.abandoned = not self._ended.is_set()
            return self.abandoned


class AbandonedThreads:
    """The threads that were given up and have not come back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def add(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)

    def names(self) -> list[str]:
        with self._lock:
            return [thread.name for thread in self._threads if thread.is_alive()]

    def wait_for(self, errand: BlockingCall[T], why_stop: Callable[[], str | None]) -> T:
        """The errand's result; raises GroupError as soon as `why_stop` names a reason.

        `why_stop` is asked every 20 ms in the waiting thread.
        """
        try:
            while not errand.ended(TICK_SECS):
                if (reason := why_stop()) is not None:
                    raise GroupError(reason)
        finally:
            given_up = errand.abandon()
            if given_up:
                self.add(errand.thread)
        return errand.take()

    def drop(self, name: str, end: Callable[[list[T]], None], box: list[T]) -> None:
        """Has `end` empty the box, which holds the last references, in a thread that may block."""
        errand: BlockingCall[None] = BlockingCall(name, lambda _: end(box))
        if not errand.ended(DROP_SECS) and errand.abandon():
            self.add(errand.thread)
