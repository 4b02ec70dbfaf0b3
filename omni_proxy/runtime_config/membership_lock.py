"""The set of replicas, kept as it is while somebody counts on it: a trainer's group has its ranks.

Invariant: while it is frozen no worker is added, removed or started anew. Whoever wants that waits
for the thaw; everything else of the configuration goes on changing.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from omni_proxy.wire.errors import HttpError

RETRY_SECS = "5"


class MembershipLock:
    """`why()`, while it is frozen, says for whom, in words for somebody who waits."""

    def __init__(self) -> None:
        self._why: Callable[[], str] | None = None
        self._thawed = trio.Event()
        self._waiting: set[trio.CancelScope] = set()

    @property
    def on(self) -> bool:
        return self._why is not None

    def why(self) -> str:
        return self._why() if self._why else ""

    def begin(self, why: Callable[[], str]) -> None:
        self._why, self._thawed = why, trio.Event()
        for scope in self._waiting:
            scope.cancel()

    def end(self) -> None:
        self._why = None
        self._thawed.set()

    async def over(self) -> None:
        while self.on:
            await self._thawed.wait()

    async def over_within(self, secs: float) -> None:
        """Raises HttpError 503 that names what it is frozen for."""
        with trio.move_on_after(secs) as scope:
            await self.over()
        if scope.cancelled_caught:
            message = (
                f"the set of workers can't change during a weight sync, and it did not end within "
                f"{secs:g} s: {self.why()}"
            )
            refusal = HttpError(503, message, "workers_frozen", detail=message)
            raise refusal.with_headers(("retry-after", RETRY_SECS))

    async def turn(self, lock: trio.Lock) -> bool:
        """Take the lock; False where it froze first, for then the lock's owner may take long."""
        with trio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                await lock.acquire()
            finally:
                self._waiting.discard(scope)
            return True
        return False
