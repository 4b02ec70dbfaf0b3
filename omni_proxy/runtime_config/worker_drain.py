"""Draining of workers: they get no new requests, and requests in flight run to their end.

Invariant: a drain ends at its deadline at the latest, and aborts no request. Enabling the worker
again cancels the drain. A requested removal happens even if its caller disconnects, or this program
is restarted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Final

import trio

from omni_proxy.config.overlay import SavedState, with_deleted
from omni_proxy.config.schema import Config
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)

POLL_SECS: Final = 0.05
DRAINING, DRAINED, OVERDUE, CANCELLED, REMOVED = (
    "draining", "drained", "overdue", "cancelled", "removed",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class WorkerDrain:
    """The drain of one worker. `ends_at` is in trio's time; `in_time`: it was idle before then."""

    worker: Worker
    since: datetime
    ends_at: float = inf
    deadline: datetime | None = None
    remove: bool = False
    state: str = DRAINING
    in_time: bool = False
    removing: bool = False  # its removal has begun
    refused: str = ""  # why the worker could not be removed
    ended: datetime | None = None
    over: trio.Event = field(default_factory=trio.Event)

    @property
    def state_since(self) -> datetime:
        """The time at which it entered its current state."""
        return self.ended or self.since

    def to_dict(self) -> dict[str, object]:
        drained_late = self.state == OVERDUE and not self.worker.in_flight
        return {
            "state": DRAINED if drained_late else self.state,
            "since": self.since.isoformat(),
            "in_flight": self.worker.in_flight,
            "deadline": self.deadline.isoformat() if self.deadline else None,
            "remove": self.remove,
        }


class WorkerDrains:
    """The drains of disabled workers; `run` ends them."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._drains: dict[Worker, WorkerDrain] = {}
        self._started = trio.Event()
        fleet.watch_members(self._follow_fleet)

    def start(self, worker: Worker, timeout_secs: float, *, remove: bool = False) -> WorkerDrain:
        """Drain a worker that is already disabled; 0 s is no deadline.

        A second call for the same worker moves the deadline.
        """
        drain = self._drains.get(worker)
        if drain is None or drain.over.is_set():
            drain = self._drains[worker] = WorkerDrain(worker, datetime.now(UTC))
        drain.remove |= remove
        drain.ends_at = trio.current_time() + timeout_secs if timeout_secs else inf
        ends_in = timedelta(seconds=timeout_secs)
        drain.deadline = datetime.now(UTC) + ends_in if timeout_secs else None
        if worker.in_flight or remove:
            _log.info("worker_draining worker=%s in_flight=%d", worker.url, worker.in_flight)
            self._started.set()
        else:
            self._end(drain, DRAINED)
        return drain

    def get_record(self, worker: Worker) -> dict[str, object] | None:
        """The worker's drain for JSON; None if there is none."""
        drain = self._drains.get(worker)
        return drain.to_dict() if drain else None

    def state_since(self, worker: Worker) -> datetime | None:
        drain = self._drains.get(worker)
        return drain.state_since if drain else None

    def secs_left(self, worker: Worker) -> float | None:
        """Seconds until the deadline; None without one."""
        drain = self._drains.get(worker)
        if drain is None or drain.ends_at == inf:
            return None
        return max(drain.ends_at - trio.current_time(), 0.0)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        for drain in self._drains.values():
            drain.removing = False
        self.resume_removals()
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                self._started = trio.Event()
                while pending := self._pending():
                    for drain in pending:
                        await self._check(drain, nursery)
                    await trio.sleep(POLL_SECS)
                await self._started.wait()

    def resume_removals(self) -> None:
        """Continue the removals that were requested before this program started."""
        for url in self._config_store.state.leaving:
            worker = self._fleet.find(url)
            if worker is not None and worker.disabled and worker not in self._drains:
                _log.info("worker_drain_resumed worker=%s", url)
                self.start(worker, self._config_store.config.server.drain_timeout_secs, remove=True)

    def _pending(self) -> list[WorkerDrain]:
        return [d for d in self._drains.values() if d.state == DRAINING and not d.removing]

    async def _check(self, drain: WorkerDrain, nursery: trio.Nursery) -> None:
        worker = drain.worker
        await (
            self._fleet.await_replicated()
        )  # until then a data-plane process could still send to it
        idle = not worker.in_flight
        if not idle and trio.current_time() < drain.ends_at:
            return
        if drain.remove and self._config_store.membership_lock.held:
            return  # it is removed after the weight sync
        drain.in_time = idle
        if idle:
            _log.info("worker_drained worker=%s", worker.url)
        else:
            in_flight = worker.in_flight
            _log.warning("worker_drain_overdue worker=%s in_flight=%d", worker.url, in_flight)
        if drain.remove:  # in its own task: it may have to wait for the operation lock
            drain.removing = True
            nursery.start_soon(self._finish_removal, drain)
        else:
            self._end(drain, DRAINED if idle else OVERDUE)

    async def _finish_removal(self, drain: WorkerDrain) -> None:
        await self._remove(drain)
        if not drain.over.is_set():
            self._end(drain, DRAINED if drain.in_time else OVERDUE)

    async def _remove(self, drain: WorkerDrain) -> None:
        worker = drain.worker

        def edit(state: SavedState, config: Config) -> SavedState:
            still_draining = drain.state == DRAINING and self._fleet.find(worker.url) is worker
            return with_deleted(state, config, worker.url) if still_draining else state

        try:
            changed = await self._config_store.change(edit)
        except HttpError as error:
            drain.refused = error.message
            return
        if changed.error is not None:
            drain.refused = str(changed.error)
            _log.error("worker_remove_failed worker=%s error=%s", worker.url, changed.error)

    def _follow_fleet(self) -> None:
        for worker, drain in list(self._drains.items()):
            if self._fleet.find(worker.url) is not worker:
                self._end(drain, REMOVED)
                del self._drains[worker]
            elif not worker.disabled:
                self._end(drain, CANCELLED)
                del self._drains[worker]
        self._resume_found_removals()

    def _resume_found_removals(self) -> None:
        """Resume removals of workers that discovery finds only after a restart."""
        for url in self._config_store.state.leaving:
            worker = self._fleet.find(url)
            if worker is None or worker in self._drains or not worker.disabled:
                continue
            if worker.discovered is not None and worker.health.state is Health.UNKNOWN:
                timeout_secs = self._config_store.config.server.drain_timeout_secs
                self.start(worker, timeout_secs, remove=True)

    def _end(self, drain: WorkerDrain, state: str) -> None:
        drain.state, drain.ended = state, datetime.now(UTC)
        drain.in_time |= state == DRAINED
        drain.over.set()


async def drain_cordoned(workers: Iterable[Worker], timeout_secs: float, operation: str) -> None:
    """Wait until the cordoned ones of `workers` are idle; at the timeout, log their number of
    requests.

    0 s does not wait. `operation` is the name of the waiting operation, for the log.
    """
    cordoned = [worker for worker in workers if worker.cordon_reasons]
    if not timeout_secs:
        return
    with trio.move_on_after(timeout_secs) as scope:
        await wait_idle(cordoned)
    if scope.cancelled_caught:
        in_flight = sum(worker.in_flight for worker in cordoned)
        _log.info(
            "operation_drain_timeout operation=%s in_flight=%d was=drain_timeout",
            operation,
            in_flight,
        )


async def wait_idle(workers: Iterable[Worker], *, poll_secs: float = POLL_SECS) -> None:
    """Wait until no worker has a request in flight. It polls, because the data plane only changes
    plain integers and signals nothing."""
    busy = list(workers)
    while any(worker.in_flight for worker in busy):  # noqa: ASYNC110
        await trio.sleep(poll_secs)
