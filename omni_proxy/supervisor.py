"""Supervisors: tasks beside the door that are restarted when they fail.

Invariant: a failure of one is logged, counted, shown and followed by a restart with back-off; it
never reaches the root nursery, so the door goes on. Cancellation passes through.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import trio

from omni_proxy.backoff import Backoff

_log = logging.getLogger(__name__)

FIRST_PAUSE_SECS: Final = 0.5
LONGEST_PAUSE_SECS: Final = 30.0
CALM_SECS: Final = 60.0  # a run that lasted so long starts the back-off anew

Run = Callable[[trio.TaskStatus[None]], Awaitable[None]]


class Supervisor:
    """One named task; `status` is its row at GET /status."""

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self._run = run
        self._state = "starting"
        self._restarts = 0
        self._last_error = ""
        self._since = datetime.now(UTC)

    def status(self) -> dict[str, object]:
        return {
            "name": self.name,
            "state": self._state,
            "restarts": self._restarts,
            "last_error": self._last_error or None,
            "since": self._since.isoformat(),
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started once its first run says so, or failed: a supervisor never blocks the start."""
        told = _Once(task_status, lambda: self._enter("running"))
        backoff = Backoff(FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS, CALM_SECS)
        while True:
            began = trio.current_time()
            try:
                await self._run(told)
                self._enter("ended")
                told.quietly()
                return
            except Exception as error:
                self._restarts += 1
                self._last_error = _words(error)
                self._enter("backing_off")
                pause = backoff.next_delay(trio.current_time() - began)
                _log.exception("%s failed; it is started again in %.1f s", self.name, pause)
            told.quietly()
            await trio.sleep(pause)

    def _enter(self, state: str) -> None:
        self._state = state
        self._since = datetime.now(UTC)


class _Once:
    """A task status that may be told again at each restart."""

    def __init__(self, status: trio.TaskStatus[None], running: Callable[[], None]) -> None:
        self._status = status
        self._running = running
        self._told = False

    def started(self, value: None = None) -> None:
        self._running()
        self.quietly()

    def quietly(self) -> None:
        if not self._told:
            self._told = True
            self._status.started(None)


def _words(error: BaseException) -> str:
    """The first real reason inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
