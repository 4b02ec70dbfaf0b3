"""Blocking calls that can't be interrupted, each in its own daemon thread.

The waiting thread may abandon a call: the blocked thread then remains until torch returns, is
counted in `AbandonedThreads`, and frees the objects that it created (a group's destructor may block
like the group). Invariant: an object created by a blocked thread is never freed in the thread that
abandoned the call. `CancelToken` lets another thread end a call that is still waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from omni_proxy.process_group.tensor_plan import GroupError

T = TypeVar("T")

POLL_SECS: Final = 0.02
DROP_SECS: Final = 2.0


class BlockingCall(Generic[T]):
    """One running call. Its thread writes `step` and `done`; any thread may read them."""

    def __init__(self, name: str, call: Callable[[BlockingCall[T]], T]) -> None:
        self.step = ""
        self.done = 0
        self.abandoned = False
        self._call: Callable[[BlockingCall[T]], T] | None = call
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: str | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        result, error = None, None
        try:
            result = call(self)
        except Exception as exception:
            # Keep only the text: the traceback's frames would keep the group alive in another
            # thread.
            error = str(exception) or type(exception).__name__
        del call
        with self._lock:
            if not self.abandoned:
                self._result, self._error = result, error
            self._ended.set()

    def wait(self, timeout_secs: float) -> bool:
        """Whether the call has ended within `timeout_secs`."""
        return self._ended.wait(timeout_secs)

    def take_result(self) -> T:
        """Return the ended call's result, only once. Raises GroupError if the call raised."""
        result, self._result = self._result, None
        if self._error is not None:
            raise GroupError(self._error)
        return result  # type: ignore[return-value]  # None is a valid result where T allows it

    def abandon(self) -> bool:
        """Stops waiting for the call. Returns False if it has already ended."""
        with self._lock:
            self.abandoned = not self._ended.is_set()
            return self.abandoned


class AbandonedThreads:
    """The threads of abandoned calls that have not returned yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def add(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(thread)

    def names(self) -> list[str]:
        with self._lock:
            return [thread.name for thread in self._threads if thread.is_alive()]

    def wait_for(self, call: BlockingCall[T], stop_reason: Callable[[], str | None]) -> T:
        """Waits for the call's result. Raises GroupError when `stop_reason` returns a reason.

        `stop_reason` is called in the waiting thread, every POLL_SECS.
        """
        try:
            while not call.wait(POLL_SECS):
                if (reason := stop_reason()) is not None:
                    raise GroupError(reason)
        finally:
            abandoned = call.abandon()
            if abandoned:
                self.add(call.thread)
        return call.take_result()

    def drop(self, name: str, end: Callable[[list[T]], None], references: list[T]) -> None:
        """Runs `end(references)` in a thread that may block; `end` has to empty the list.

        The list has the last references to the objects, so that they are freed in that thread.
        """
        call: BlockingCall[None] = BlockingCall(name, lambda _: end(references))
        if not call.wait(DROP_SECS) and call.abandon():
            self.add(call.thread)


class CancelToken:
    """Cancels one call, from any thread, before the call or during it.

    Invariant: the token stays cancelled, and the callback runs once: in the thread that cancels or,
    if the token was cancelled earlier, in the thread that registers the callback.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._lock = threading.Lock()
        self._callback: Callable[[str], None] | None = None

    def cancel(self, reason: str) -> None:
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            callback = self._callback
        if callback is not None:
            callback(reason)

    def on_cancel(self, callback: Callable[[str], None] | None) -> None:
        """Registers `callback`, which gets the reason; None unregisters it."""
        with self._lock:
            self._callback, reason = callback, self.reason
        if reason is not None and callback is not None:
            callback(reason)
