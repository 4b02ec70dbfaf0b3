"""Runs a rollout: observes the fleet, runs batches under the operation lock, publishes the end.

Between two batches the operation lock is free, so workers may join and leave; other operations on
weights are refused during the whole rollout (service.py). Invariant: a batch is decided again once
the lock is held, and the end is published only when no worker is left to update or restore.
"""

from __future__ import annotations

import logging
from typing import Final
from uuid import uuid4

import trio
from msgspec.structs import replace

from omni_proxy.admin_ops.admin_route_table import ROLLOUT
from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.fleet.cordon_reasons import CATCHING_UP, LAUNCH_CORDON, PAUSED, UNCERTAIN, UNPROVEN
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.worker_update import BY_RPC, CannotUpdate, inspect
from omni_proxy.weight_sync.operations.operation_queue import OperationQueue
from omni_proxy.weight_sync.protocol import rollout_state_machine as transitions
from omni_proxy.weight_sync.protocol.published_version import ALL_WORKERS
from omni_proxy.weight_sync.protocol.rollout_state_machine import (
    Finish,
    FormerVersion,
    NextBatch,
    Presence,
    RolloutPhase,
    RolloutWorker,
    WorkerPhase,
)
from omni_proxy.weight_sync.rollout.batch import BatchChange, RolloutContext
from omni_proxy.weight_sync.rollout.progress import now_text
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.wire.errors import HttpError

POLL_SECS: Final = 0.2
RETRY_SECS: Final = 1.0  # after the operation lock could not be acquired
# Cordon reasons that end by themselves or by a call; the rollout waits for these workers.
_SETTLING: Final = frozenset((UNPROVEN, CATCHING_UP, LAUNCH_CORDON, PAUSED))
_log = logging.getLogger(__name__)


class FleetView:
    """Reads the state of the fleet for a rollout."""

    def __init__(self, context: RolloutContext, store_service: StoreService) -> None:
        self._context = context
        self._fleet = context.operations.fleet
        self._journal = context.operations.journal
        self._store_service = store_service
        self._rejected: dict[str, int] = {}  # URLs of workers that can't join, and their epoch

    def presence(self) -> dict[str, Presence]:
        return {row.url: self._presence(row) for row in self._context.progress.now.workers}

    def _presence(self, row: RolloutWorker) -> Presence:
        worker = self._fleet.find(row.url)
        if worker is None or worker.health.state is Health.DEAD:
            return Presence.GONE
        if worker.health.state is Health.UNKNOWN:
            return Presence.UNKNOWN
        if worker.health.state is not Health.HEALTHY:
            return Presence.DOWN
        if worker.cordon_reasons & _SETTLING:
            return Presence.UNKNOWN
        epoch = self._context.progress.now.epoch
        if row.phase is WorkerPhase.UPDATED and worker.weight_epoch != epoch:
            return Presence.UNKNOWN if worker.weight_label is None else Presence.MISSED
        return Presence.SERVING if worker.routable else Presence.OUT_OF_ROTATION

    async def joined_workers(self) -> list[RolloutWorker]:
        """Workers that joined the fleet during the rollout, or are healthy again."""
        state = self._context.progress.now
        urls = {row.url for row in state.workers if row.phase is not WorkerPhase.SKIPPED}
        expected = {row.url for row in state.workers}
        joined = []
        for worker in self._fleet.workers:
            healthy = worker.health.state is Health.HEALTHY
            settled = worker.weight_label is not None or UNCERTAIN in worker.cordon_reasons
            if worker.url in urls or worker.model != state.model or not (healthy and settled):
                continue
            if worker.url not in expected and not state.open_ended:
                continue
            if self._rejected.get(worker.url) == worker.health.epoch:
                continue
            try:
                joined.append(await self.describe(worker))
            except CannotUpdate as error:
                self._rejected[worker.url] = worker.health.epoch
                _log.warning(
                    "rollout_worker_skipped worker=%s reason=%s was=rollout_left_out",
                    worker.url,
                    str(error),
                )
        return joined

    async def describe(self, worker: Worker) -> RolloutWorker:
        """Describe the worker as part of a rollout. Raises CannotUpdate."""
        engine = await inspect(worker, self._context.credentials)
        published = self._journal.published
        due = published.target_for(worker.url, worker.model)
        path = engine.path
        if due is not None and due.epoch == worker.weight_epoch and due.path:
            path = due.path
        elif due is not None and engine.dialect == BY_RPC:
            raise CannotUpdate(
                "it is a vLLM server whose weights were not loaded from a known path, so they "
                "could not be restored"
            )
        former = FormerVersion(
            label=engine.label,
            epoch=worker.weight_epoch,
            path=path,
            number=self._number_of(worker.weight_epoch),
            target=published.targets.get(worker.url),
        )
        return RolloutWorker(
            url=worker.url,
            dialect=engine.dialect,
            former=None if worker.url in self._journal.uncertain else former,
            served=worker.routable,
        )

    def _number_of(self, epoch: int) -> int:
        versions = [v for v in self._store_service.versions() if epoch and v.epoch == epoch]
        return versions[0].number if versions else 0

    def find_stored(self, number: int) -> StoredVersion | None:
        versions = [v for v in self._store_service.versions() if v.number == number]
        return versions[0] if number and versions else None


class RolloutDriver:
    """Runs rollouts. `run` first continues one that has not ended when the proxy did."""

    def __init__(
        self,
        context: RolloutContext,
        queue: OperationQueue,
        view: FleetView,
        store_service: StoreService,
    ) -> None:
        self._context, self._queue, self._view = context, queue, view
        self._progress = context.progress
        self._fleet = context.operations.fleet
        self._journal = context.operations.journal
        self._store_service = store_service

    async def run(self) -> None:
        """Run until cancelled."""
        progress = self._progress
        progress.clear_steps()
        if progress.active is not None:
            progress.put(transitions.recover(progress.now))
            _log.warning("rollout_continued id=%s state=%s", progress.now.id, progress.now.phase)
        while True:
            if progress.active is None:
                await progress.changed.wait()
            else:
                await self._advance()

    async def _advance(self) -> None:
        progress = self._progress
        await trio.lowlevel.checkpoint()
        await self._observe_fleet()
        decision = transitions.decide(progress.now, self._view.presence())
        if isinstance(decision, Finish):
            await self._finish(decision)
        elif isinstance(decision, NextBatch):
            await self._take_turn()
        else:
            progress.wait_for(decision.reason)
            with trio.move_on_after(POLL_SECS):
                await progress.changed.wait()

    async def _observe_fleet(self) -> None:
        progress = self._progress
        progress.put(transitions.observe(progress.now, self._view.presence()))
        if progress.now.phase is not RolloutPhase.ROLLING_BACK:
            joined = await self._view.joined_workers()
            if joined and progress.now.phase in (RolloutPhase.RUNNING, RolloutPhase.PAUSED):
                progress.put(transitions.join(progress.now, joined))

    async def _take_turn(self) -> None:
        caller, now = self._progress.now.caller, trio.current_time()
        operation = Operation(uuid4().hex, ROLLOUT, caller, now)
        self._progress.wait_for("")
        try:
            await self._queue.run(operation, lambda: self._perform(operation))
        except HttpError as error:
            self._progress.wait_for(error.message)
            await trio.sleep(RETRY_SECS)
        finally:
            self._progress.clear_steps()

    async def _perform(self, operation: Operation) -> AdminResponse:
        """Run the next batch. Decide it again: the fleet may have changed during the wait."""
        progress, presence = self._progress, self._view.presence()
        progress.put(transitions.observe(progress.now, presence))
        batch = transitions.decide(progress.now, presence)
        urls = batch.urls if isinstance(batch, NextBatch) else ()
        known = [self._fleet.find(url) for url in urls]
        workers = [worker for worker in known if worker is not None]
        if not isinstance(batch, NextBatch) or len(workers) < len(urls):
            return AdminResponse(200, {"success": True, "message": "nothing was left to do"})
        operation.target({worker.url: frozenset(worker.cordon_reasons) for worker in workers})
        await BatchChange(self._context, operation, workers, restores=batch.restores).run()
        rows = [progress.now.worker(worker.url) for worker in workers]
        phase = WorkerPhase.RESTORED if batch.restores else WorkerPhase.UPDATED
        success = all(row.phase is phase for row in rows)
        message = (
            "ok" if success else next((r.reason for r in rows if r.reason), progress.now.cause)
        )
        body = {"success": success, "message": message, "weight_epoch": progress.now.epoch or None}
        return AdminResponse(200 if success else 502, body)

    async def _finish(self, end: Finish) -> None:
        progress = self._progress
        state = progress.now
        progress.ending = True
        try:
            if end.phase is RolloutPhase.SUCCEEDED:
                await self._publish_to_all()
            else:
                await self._journal.withdraw({}, (state.epoch_before, state.label_before))
            await progress.end(transitions.finish(state, end, now_text()))
        finally:
            progress.ending = False
        level = logging.INFO if end.phase is RolloutPhase.SUCCEEDED else logging.WARNING
        name, phase, cause = state.label, end.phase, end.cause or "none"
        _log.log(level, "rollout_%s id=%s version=%s cause=%s", phase, state.id, name, cause)

    async def _publish_to_all(self) -> None:
        """Make the version the target of all workers, also of those that become healthy later."""
        state = self._progress.now
        target = self._journal.published.targets.get(state.urls(WorkerPhase.UPDATED)[0])
        if target is not None and state.open_ended:
            everyone = tuple({worker.model for worker in self._fleet.workers})
            target = replace(target, models=tuple({state.model, *everyone}))
            await self._journal.extend(target, [ALL_WORKERS], only=True)
        version = self._view.find_stored(state.number)
        if version is not None:
            await self._store_service.published(version, state.label, state.epoch)
