"""Operations that change workers: their queue, calls that outlive their callers, JSON, history.

Invariant of the queue: one operation runs at a time, in the order of arrival, and none while the
configuration changes the fleet: each operation holds the configuration store's operation lock.

Invariant of detached calls: a call runs in its own task, and cancelling the caller does not cancel
it. A caller that repeats a call whose earlier caller has disconnected gets the result of the
running call. Two callers that wait at the same time start two calls. The records' keys are
documented in docs/http.md; records and history must not change an operation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import trio

from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, refused
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError

HISTORY_LENGTH: Final = 50
Perform = Callable[[], Awaitable[AdminResponse]]


@dataclass(slots=True, eq=False)
class _PendingCall:
    """A running call; `callers` is the number of tasks that wait for it."""

    key: object
    callers: int = 0
    response: AdminResponse | None = None
    done: trio.Event = field(default_factory=trio.Event)


class DetachedCalls:
    """Runs calls in its nursery. `on_unclaimed(key, response)` gets responses without a caller."""

    def __init__(self, on_unclaimed: Callable[[object, AdminResponse], None]) -> None:
        self.nursery: trio.Nursery | None = None
        self._on_unclaimed = on_unclaimed
        self._pending: list[_PendingCall] = []

    async def run(self, key: object, perform: Perform) -> AdminResponse:
        """Wait for the response. Cancellation ends only the wait, not the call."""
        if self.nursery is None:
            return refused(_unavailable())
        call = next((c for c in self._pending if c.key == key and not c.callers), None)
        if call is None:
            call = _PendingCall(key)
            self._pending.append(call)
            self.nursery.start_soon(self._perform, call, perform)
        call.callers += 1
        try:
            await call.done.wait()
        finally:
            call.callers -= 1
        return call.response or refused(_unavailable())

    async def _perform(self, call: _PendingCall, perform: Perform) -> None:
        try:
            call.response = await perform()
        except HttpError as error:
            call.response = refused(error)
        finally:
            self._pending.remove(call)
            if not call.callers and call.response is not None:
                self._on_unclaimed(call.key, call.response)
            call.done.set()


def _unavailable() -> HttpError:
    message = "operations on workers are not available now; their service is being restarted"
    return HttpError(503, message, "weights_unavailable").with_headers(("retry-after", "1"))


class OperationQueue:
    """Runs operations one after the other.

    `on_response(operation, response)` is called while the operation still holds the lock,
    `on_end(operation)` after the lock was released, also for an operation that failed.
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
        # With [cluster]: take and release the operation lease of the cluster. `acquire_cluster`
        # raises HttpError 503.
        self.acquire_cluster: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.release_cluster: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self._on_response = on_response
        self._on_end = on_end

    def targets(self, worker: Worker) -> bool:
        """Whether the running operation targets this worker."""
        return self.current is not None and worker.url in self.current.targets

    async def run(self, operation: Operation, perform: Perform) -> AdminResponse:
        """Run `perform` under the lock. Raises HttpError 503 if the lock isn't free in time."""
        self.waiting.append(operation)
        try:
            await self._acquire_lock()
        finally:
            self.waiting.remove(operation)
        try:
            await self.acquire_cluster()
            self.current = operation
            try:
                response = await perform()
            finally:
                await self.release_cluster()
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
        if self._config_store.predecessor is None:
            try:
                lock.acquire_nowait()
                return
            except trio.WouldBlock:
                pass
        with trio.move_on_after(secs) as scope:
            await self._config_store.wait_predecessor_gone()
            await lock.acquire()
        if scope.cancelled_caught:
            now = trio.current_time()
            holder = self.current.describe(now) if self.current else "a change of the fleet"
            if self._config_store.predecessor is not None:
                holder = "the program before the upgrade still serves requests"
            message = (
                f"admin update lock not acquired within {secs:g}s; another update operation may be "
                f"in progress: {holder}"
            )
            record = operation_record(self.current, now) if self.current else None
            error = HttpError(503, message, "update_in_progress", holder=record)
            raise error.with_headers(("retry-after", "1"))


# JSON of operations: in GET /weights, in the history, and in the error after a wait.


def operation_record(operation: Operation, now: float) -> dict[str, object]:
    return {
        "id": operation.id,
        "path": operation.route.path,
        "caller": operation.caller,
        "step": operation.step.value,
        "age_secs": round(now - operation.requested_at, 3),
        "step_secs": round(now - operation.since, 3) if operation.since else 0.0,
        "workers": worker_rows(operation),
    }


def worker_rows(operation: Operation) -> list[dict[str, object]]:
    """A row for each target: waiting, called, or its result."""
    return [
        {"worker": url, **_progress(operation.results.get(url), called=operation.has_called)}
        for url in operation.targets
    ]


def _progress(result: WorkerResult | None, *, called: bool) -> dict[str, object]:
    if result is None:
        return {"progress": "asked" if called else "waiting"}
    if result.success:
        return {"progress": "done", "seconds": result.secs}
    return {"progress": "failed", "seconds": result.secs, "reason": result.reason}


def _ignore(operation: Operation, response: AdminResponse, secs: float) -> None:
    """The default `on_end`, used without tracing."""


class OperationHistory:
    """The last operations, newest last, and counters over all of them by path."""

    def __init__(self) -> None:
        self.rows: deque[dict[str, object]] = deque(maxlen=HISTORY_LENGTH)
        self.ended: Counter[tuple[str, bool]] = Counter()  # by path and success
        self.spent_secs: dict[str, float] = {}  # by path: sum of the times from request to end
        # Called with each operation that ended, its response, and its duration in seconds.
        self.on_end: Callable[[Operation, AdminResponse, float], None] = _ignore

    def record(self, operation: Operation, response: AdminResponse) -> None:
        now = trio.current_time()
        path = operation.route.path
        self.ended[path, response.ok] += 1
        self.spent_secs[path] = self.spent_secs.get(path, 0.0) + now - operation.requested_at
        self.on_end(operation, response, now - operation.requested_at)
        self.rows.append(
            {
                "id": operation.id,
                "path": operation.route.path,
                "caller": operation.caller,
                "ended_at": datetime.now(UTC).isoformat(),
                "secs": round(now - operation.requested_at, 3),
                "http_status": response.status,
                "success": response.ok,
                "message": response.body.get("message"),
                "weight_epoch": response.body.get("weight_epoch"),
                "workers": worker_rows(operation),
            }
        )
