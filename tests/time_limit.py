"""Fails each test that has not ended after `LIMIT_SECS`: a test that waits without an end would
otherwise stop the whole run.

The time is real time, because a test may have a clock of its own. An asynchronous test is
cancelled, so that its fixtures end what they have started; `CLEANUP_SECS` later, so is what it has
shielded. Where no other task can run, in a blocking call, the signal handler raises.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Generator
from inspect import iscoroutinefunction
from typing import Any

import pytest
import trio

LIMIT_SECS = 600.0  # longer than all deadlines of tests, whose messages say more
CLEANUP_SECS = 30.0


class TimeLimitError(Exception):
    """The test has not ended in time. Its cause shows where it waited."""


class _AsyncTest:
    """The running asynchronous test."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self._token = trio.lowlevel.current_trio_token()
        self._requested = False

    def cancel(self) -> None:
        """Call it again while the test has not ended. Raises TimeLimitError in a blocking call."""
        if not self._requested:
            self._requested = True
            self._token.run_sync_soon(self.scope.cancel)
        elif self.scope.cancel_called:
            self._token.run_sync_soon(_unshield, self.scope._cancel_status)
        else:
            raise TimeLimitError("a call blocks the event loop")


def _unshield(status: Any) -> None:
    for inner in status._children:
        inner._scope.shield = False
        _unshield(inner)


class TimeLimit:
    """A pytest plug-in."""

    def __init__(self, secs: float = LIMIT_SECS, cleanup_secs: float = CLEANUP_SECS) -> None:
        self._secs = secs
        self._cleanup_secs = cleanup_secs
        self._running: _AsyncTest | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if iscoroutinefunction(getattr(item, "obj", None)):
                item.add_marker(pytest.mark.trio(run=self._run), append=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        before = signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, self._secs, self._cleanup_secs)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _on_alarm(self, *_: object) -> None:
        if self._running is None:
            raise self._error()
        self._running.cancel()

    def _error(self) -> TimeLimitError:
        return TimeLimitError(f"the test has not ended after {self._secs:g} s")

    def _run(self, test: Callable[[], Awaitable[object]], **settings: Any) -> None:
        async def cancellable() -> None:
            self._running = running = _AsyncTest()
            waited = None
            with running.scope:
                try:
                    await test()
                except BaseException as error:
                    waited = error
                    raise
            if running.scope.cancel_called:
                raise self._error() from waited

        try:
            trio.run(cancellable, **settings)
        finally:
            self._running = None
