"""The membership lock: prevents changes of the set of workers during a weight sync.

Invariant: while it is held no worker is added, removed or restarted, because the sync's group has
their ranks. Such a change waits until the lock is released; other changes of the configuration
proceed.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from omni_proxy.wire.errors import HttpError

RETRY_SECS = "5"


class MembershipLock:
    """A lock with one holder. `reason()` returns why it is held, for a client that waits."""

    def __init__(self) -> None:
        self._reason: Callable[[], str] | None = None
        self._released = trio.Event()
        self._pending: set[trio.CancelScope] = set()

    @property
    def held(self) -> bool:
        return self._reason is not None

    def reason(self) -> str:
        return self._reason() if self._reason else ""

    def acquire(self, reason: Callable[[], str]) -> None:
        self._reason, self._released = reason, trio.Event()
        for scope in self._pending:
            scope.cancel()

    def release(self) -> None:
        self._reason = None
        self._released.set()

    async def wait_released(self) -> None:
        while self.held:
            await self._released.wait()

    async def wait_released_within(self, secs: float) -> None:
        """Wait for at most `secs`. Raises HttpError 503 with the reason."""
        with trio.move_on_after(secs) as scope:
            await self.wait_released()
        if scope.cancelled_caught:
            message = (
                f"the set of workers can't change during a weight sync, and it did not end within "
                f"{secs:g} s: {self.reason()}"
            )
            error = HttpError(503, message, "workers_frozen", detail=message)
            raise error.with_headers(("retry-after", RETRY_SECS))

    async def acquire_unless_held(self, lock: trio.Lock) -> bool:
        """Acquire `lock`; returns False if the membership lock is acquired first.

        A weight sync may hold `lock` for a long time, so waiters give up when it begins.
        """
        with trio.CancelScope() as scope:
            self._pending.add(scope)
            try:
                await lock.acquire()
            finally:
                self._pending.discard(scope)
            return True
        return False
