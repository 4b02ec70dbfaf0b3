"""The queue of operations that change workers, and the one that runs.

Invariant: one operation runs at a time, in the order of arrival, and none while the configuration
changes the fleet: all of them hold the configuration store's operation lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.weight_sync.operations.detached_calls import Perform
from omni_proxy.wire.errors import HttpError


class OperationQueue:
    """`on_response(operation, response)`: it has a response, and still holds the lock.

    `on_end(operation)`: the lock is released, whatever the operation came to.
    """

    def __init__(
        self,
        config_store: ConfigStore,
        on_response: Callable[[Operation, AdminResponse], None],
        on_end: Callable[[Operation], None],
    ) -> None:
        self.current: Operation | None = None
        self.waiting: list[Operation] = []
        self._config_store = config_store
        self._on_response = on_response
        self._on_end = on_end

    def targets(self, worker: Worker) -> bool:
        """Whether the running operation targets this worker."""
        return self.current is not None and worker.url in self.current.targets

    async def run(self, operation: Operation, perform: Perform) -> AdminResponse:
        """Raises HttpError 503 if the operations before it take too long."""
        self.waiting.append(operation)
        try:
            await self._acquire_lock()
        finally:
            self.waiting.remove(operation)
        try:
            self.current = operation
            response = await perform()
            self._on_response(operation, response)
            return response
        finally:
            self.current = None
            self._config_store.operation_lock.release()
            self._on_end(operation)

    async def _acquire_lock(self) -> None:
        lock, secs = (
            self._config_store.operation_lock,
            self._config_store.config.admin.lock_timeout_secs,
        )
        try:
            lock.acquire_nowait()
            return
        except trio.WouldBlock:
            pass
        with trio.move_on_after(secs) as scope:
            await lock.acquire()
        if scope.cancelled_caught:
            now = trio.current_time()
            holder = self.current.in_words(now) if self.current else "a change of the fleet"
            message = (
                f"admin update lock not acquired within {secs:g}s; another update operation may be "
                f"in progress: {holder}"
            )
            error = HttpError(
                503, message, "update_in_progress", holder=_to_dict(self.current, now)
            )
            raise error.with_headers(("retry-after", "1"))


def _to_dict(operation: Operation | None, now: float) -> dict[str, Any] | None:
    return operation.status(now) if operation else None
