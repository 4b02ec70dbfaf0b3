"""WorkerDrains: workers that get no new request until what they have in flight has ended.

Invariant: a drain ends by itself, at the latest at its deadline, and cuts nothing. Whoever enables
the worker again has ended it; whoever asked for its removal and left gets it all the same, be it
after a restart of this program.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Final

import trio

from omni_proxy.config.overlay import SavedState, with_deleted
from omni_proxy.config.schema import Config
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)

LOOK_SECS: Final = 0.05
RUNS, DRAINED, OVERDUE, CANCELLED, REMOVED = (
    "draining", "drained", "overdue", "cancelled", "removed",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class WorkerDrain:
    """One worker's. `ends_at` is trio's time; `in_time`: it was empty before that."""

    worker: Worker
    since: datetime
    ends_at: float = inf
    deadline: datetime | None = None
    remove: bool = False
    state: str = RUNS
    in_time: bool = False
    leaving: bool = False  # its removal is under way
    refused: str = ""  # why it could not be removed
    ended: datetime | None = None
    over: trio.Event = field(default_factory=trio.Event)

    @property
    def state_since(self) -> datetime:
        """When it came to its present state."""
        return self.ended or self.since

    def told(self) -> dict[str, object]:
        late = self.state == OVERDUE and not self.worker.in_flight
        return {
            "state": DRAINED if late else self.state,
            "since": self.since.isoformat(),
            "in_flight": self.worker.in_flight,
            "deadline": self.deadline.isoformat() if self.deadline else None,
            "remove": self.remove,
        }


class WorkerDrains:
    """Of workers that are disabled already; `run` looks after them."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._drains: dict[Worker, WorkerDrain] = {}
        self._begun = trio.Event()
        fleet.watch_members(self._follow_fleet)

    def start(self, worker: Worker, timeout_secs: float, *, remove: bool = False) -> WorkerDrain:
        """A second one for the same worker moves its deadline; 0 s is none."""
        drain = self._drains.get(worker)
        if drain is None or drain.over.is_set():
            drain = self._drains[worker] = WorkerDrain(worker, datetime.now(UTC))
        drain.remove |= remove
        drain.ends_at = trio.current_time() + timeout_secs if timeout_secs else inf
        ends_in = timedelta(seconds=timeout_secs)
        drain.deadline = datetime.now(UTC) + ends_in if timeout_secs else None
        if worker.in_flight or remove:
            _log.info("Worker %s is draining: %d in flight", worker.url, worker.in_flight)
            self._begun.set()
        else:
            self._end(drain, DRAINED)
        return drain

    def get_record(self, worker: Worker) -> dict[str, object] | None:
        """How far it is, JSON-able; None for a worker that nobody drains."""
        drain = self._drains.get(worker)
        return drain.told() if drain else None

    def state_since(self, worker: Worker) -> datetime | None:
        drain = self._drains.get(worker)
        return drain.state_since if drain else None

    def secs_left(self, worker: Worker) -> float | None:
        """Until its deadline; None where it has none."""
        drain = self._drains.get(worker)
        if drain is None or drain.ends_at == inf:
            return None
        return max(drain.ends_at - trio.current_time(), 0.0)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        for drain in self._drains.values():
            drain.leaving = False
        self._take_up()
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                self._begun = trio.Event()
                while running := self._running():
                    for drain in running:
                        await self._look(drain, nursery)
                    await trio.sleep(LOOK_SECS)
                await self._begun.wait()

    def _take_up(self) -> None:
        """Removals that were asked for before we were started."""
        for url in self._config_store.state.leaving:
            worker = self._fleet.find(url)
            if worker is not None and worker.disabled and worker not in self._drains:
                _log.info("Worker %s was draining when the program ended, to be removed", url)
                self.start(worker, self._config_store.config.server.drain_timeout_secs, remove=True)

    def _running(self) -> list[WorkerDrain]:
        return [d for d in self._drains.values() if d.state == RUNS and not d.leaving]

    async def _look(self, drain: WorkerDrain, nursery: trio.Nursery) -> None:
        worker = drain.worker
        await (
            self._fleet.await_replicated()
        )  # else a door that has not heard yet could still send to it
        empty = not worker.in_flight
        if not empty and trio.current_time() < drain.ends_at:
            return
        if drain.remove and self._config_store.membership_lock.held:
            return  # it stays until a weight sync lets the set of workers change again
        drain.in_time = empty
        if empty:
            _log.info("Worker %s is drained", worker.url)
        else:
            running = worker.in_flight
            _log.warning("Worker %s: its time to drain is over, %d in flight", worker.url, running)
        if drain.remove:  # beside the others: it waits for the end of an operation on the workers
            drain.leaving = True
            nursery.start_soon(self._see_off, drain)
        else:
            self._end(drain, DRAINED if empty else OVERDUE)

    async def _see_off(self, drain: WorkerDrain) -> None:
        await self._remove(drain)
        if not drain.over.is_set():
            self._end(drain, DRAINED if drain.in_time else OVERDUE)

    async def _remove(self, drain: WorkerDrain) -> None:
        worker = drain.worker

        def edit(state: SavedState, config: Config) -> SavedState:
            wanted = drain.state == RUNS and self._fleet.find(worker.url) is worker
            return with_deleted(state, config, worker.url) if wanted else state

        try:
            changed = await self._config_store.change(edit)
        except HttpError as refusal:
            drain.refused = refusal.message
            return
        if changed.error is not None:
            drain.refused = str(changed.error)
            _log.error("worker %s could not be removed: %s", worker.url, changed.error)

    def _follow_fleet(self) -> None:
        for worker, drain in list(self._drains.items()):
            if self._fleet.find(worker.url) is not worker:
                self._end(drain, REMOVED)
                del self._drains[worker]
            elif not worker.disabled:
                self._end(drain, CANCELLED)
                del self._drains[worker]

    def _end(self, drain: WorkerDrain, state: str) -> None:
        drain.state, drain.ended = state, datetime.now(UTC)
        drain.in_time |= state == DRAINED
        drain.over.set()


# Time for requests that run on workers which get no new ones any more.
#
# Invariant: it waits for those alone that are held; what is late is left to the caller's own choice.

POLL_SECS: Final = 0.05
_log = logging.getLogger(__name__)


async def wait_idle(workers: Sequence[Worker], within_secs: float, what: str) -> None:
    """0 s is no wait at all."""
    held = [worker for worker in workers if worker.cordon_reasons]
    if not within_secs:
        return
    with trio.move_on_after(within_secs) as scope:
        while any(worker.in_flight for worker in held):  # noqa: ASYNC110  # plain ints ring no bell
            await trio.sleep(POLL_SECS)
    if scope.cancelled_caught:
        left = sum(worker.in_flight for worker in held)
        _log.info("%s does not wait for %d requests that still run", what, left)
