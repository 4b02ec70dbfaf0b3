"""Supervisors: services that are restarted, with back-off, when they fail.

Invariant: a failure is logged, counted, shown at GET /status and followed by a restart; it never
reaches the root nursery, so the data plane continues. Cancellation is not caught.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final, Protocol

import trio

from omni_proxy.shared.backoff import Backoff

_log = logging.getLogger(__name__)

FIRST_PAUSE_SECS: Final = 0.5
MAX_PAUSE_SECS: Final = 30.0
RESET_SECS: Final = 60.0  # a run of at least this time resets the back-off


class ServiceRun(Protocol):
    """The `run` of a service: it runs until it is cancelled, and calls `task_status.started`."""

    def __call__(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]: ...


class Supervisor:
    """One named service; `status` is its row at GET /status.

    `old_name`: its name in the previous release, for which `rows` returns a second row.
    """

    def __init__(self, name: str, run: ServiceRun, old_name: str = "") -> None:
        self.name = name
        self._old_name = old_name
        self._run = run
        self._state = "starting"
        self._restarts = 0
        self._last_error = ""
        self._since = datetime.now(UTC)
        self._scope = trio.CancelScope()
        self._over = trio.Event()
        self._resumed = trio.Event()

    async def stop(self) -> None:
        """End the service, and wait until it has ended. It must have been started; `resume` starts
        it again."""
        self._scope.cancel()
        await self._over.wait()

    def resume(self) -> None:
        """Start the service again after `stop`. May be called while `stop` is still waiting."""
        self._resumed.set()

    def status(self) -> dict[str, object]:
        return {
            "name": self.name,
            "state": self._state,
            "restarts": self._restarts,
            "last_error": self._last_error or None,
            "since": self._since.isoformat(),
        }

    def rows(self) -> list[dict[str, object]]:
        """Its row, and a copy under its old name, whose `same_as` is the current name."""
        row = self.status()
        if not self._old_name:
            return [row]
        return [row, {**row, "name": self._old_name, "same_as": self.name}]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the service until cancelled. Reports `started` when the first run does, or when it
        fails, so that it never blocks the start."""
        started = _StartedOnce(task_status, lambda: self._enter("running"))
        try:
            while True:
                with self._scope:
                    await self._run_with_restarts(started)
                if not self._scope.cancelled_caught:
                    return
                self._enter("ended")
                self._over.set()
                await self._resumed.wait()
                self._scope = trio.CancelScope()
                self._over, self._resumed = trio.Event(), trio.Event()
        finally:
            self._over.set()

    async def _run_with_restarts(self, started: _StartedOnce) -> None:
        backoff = Backoff(FIRST_PAUSE_SECS, MAX_PAUSE_SECS, RESET_SECS)
        while True:
            started_at = trio.current_time()
            try:
                await self._run(task_status=started)
                self._enter("ended")
                started.forward()
                return
            except Exception as error:
                self._restarts += 1
                self._last_error = _error_text(error)
                self._enter("backing_off")
                pause = backoff.next_delay(trio.current_time() - started_at)
                _log.exception("service_failed name=%s restart_in=%.1fs", self.name, pause)
            started.forward()
            await trio.sleep(pause)

    def _enter(self, state: str) -> None:
        self._state = state
        self._since = datetime.now(UTC)


class _StartedOnce:
    """A task status whose `started` may be called again at each restart."""

    def __init__(self, status: trio.TaskStatus[None], on_running: Callable[[], None]) -> None:
        self._status = status
        self._on_running = on_running
        self._forwarded = False

    def started(self, value: None = None) -> None:
        self._on_running()
        self.forward()

    def forward(self) -> None:
        if not self._forwarded:
            self._forwarded = True
            self._status.started(None)


def _error_text(error: BaseException) -> str:
    """The first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
