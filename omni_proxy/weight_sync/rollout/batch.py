"""One batch of a rollout: its workers leave rotation, are updated, proven, warmed up, and return.

    cordon -> drain -> record -> load -> label, digest -> probe request -> publish -> uncordon
       └────────┴─ not idle in time, cancelled: uncordon, nothing was sent
Called while the operation lock is held. Invariants: nothing is sent to a worker before it is idle
and the journal has recorded that its weights are unknown; a worker returns to rotation only with a
proven version, the new or its former one. A worker without one is marked uncertain, with the
rollout in the reason. The outcome of one worker does not affect the others of the batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio
from msgspec.structs import replace

from omni_proxy.admin_ops.operation import Operation, Step
from omni_proxy.fleet.cordon_reasons import ROLLOUT_BATCH, UPDATING
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.worker_update import (
    UpdateSettings,
    WeightSource,
    WorkerUpdater,
    check_label,
    differs,
    read_digest,
    warm_up,
)
from omni_proxy.weight_sync.protocol import rollout_state_machine as transitions
from omni_proxy.weight_sync.protocol.checksum_agreement import Digest
from omni_proxy.weight_sync.protocol.published_version import TargetVersion
from omni_proxy.weight_sync.protocol.rollout_state_machine import (
    FormerVersion,
    RolloutPhase,
    WorkerPhase,
)
from omni_proxy.weight_sync.rollout.progress import RolloutProgress
from omni_proxy.weight_sync.state_journal import OperationContext
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.worker_calls import limit_secs

DRAIN_POLL_SECS: Final = 0.05
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RolloutContext:
    """Shared by the batches of a rollout.

    `find_stored`: returns a stored version by its number, or None. `credentials`: the caller's;
    they are only in memory, so a rollout that continues after a restart has none.
    """

    operations: OperationContext
    progress: RolloutProgress
    updater: WorkerUpdater
    find_stored: Callable[[int], StoredVersion | None]
    credentials: Mapping[str, str] = field(default_factory=dict)
    publishing: trio.Lock = field(default_factory=trio.Lock)

    def settings(self) -> UpdateSettings:
        config = self.operations.config_store.config
        verify = config.weight_sync.verify == "checksum"
        return UpdateSettings(
            limit_secs(config.admin.worker_timeout_secs), verify, self.credentials
        )


class BatchChange:
    """Updates or restores the `workers` of a batch. Call `run` once.

    `restores`: they get their former version back.
    """

    def __init__(
        self,
        context: RolloutContext,
        operation: Operation,
        workers: Sequence[Worker],
        *,
        restores: bool,
    ) -> None:
        self._context, self._operation = context, operation
        self._workers, self._restores = workers, restores
        self._fleet = context.operations.fleet
        self._journal = context.operations.journal
        self._progress = context.progress
        self._settings = context.settings()
        self._redone: set[str] = set()  # URLs of workers whose weights were unknown before

    async def run(self) -> None:
        """Run the batch. Failures of workers are recorded, not raised."""
        started = False
        for worker in self._workers:
            self._fleet.cordon(worker, ROLLOUT_BATCH)
            if UPDATING not in worker.cordon_reasons:
                self._fleet.cordon(worker, UPDATING)
        try:
            await self._fleet.await_held()
            self._operation.enter(Step.DRAINING, trio.current_time())
            started = await self._drain() and await self._record()
        finally:
            if not started:
                for worker in self._workers:
                    self._release(worker)
        if not started:
            return
        self._operation.enter(Step.CALLING, trio.current_time())
        async with trio.open_nursery() as nursery:
            for worker in self._workers:
                nursery.start_soon(self._restore if self._restores else self._update, worker)
        self._operation.enter(Step.OVER, trio.current_time())

    # Before the first call

    async def _drain(self) -> bool:
        """Wait until all workers are idle; return whether they are. A restore has no deadline."""
        secs = 0.0 if self._restores else self._progress.now.drain_secs
        phase = self._progress.now.phase
        with trio.move_on_after(secs or math.inf):
            while busy := [worker for worker in self._workers if worker.in_flight]:
                for worker in self._workers:
                    self._enter(worker, "draining" if worker in busy else "idle")
                await trio.sleep(DRAIN_POLL_SECS)
                if self._progress.now.phase is not phase:
                    return False  # paused or cancelled
            return self._progress.now.phase is phase
        counts = ", ".join(f"{worker.in_flight} at {worker.url}" for worker in busy)
        cause = (
            f"requests were still running after {secs:g} s: {counts}. Nothing was sent to it; "
            "allow more time with drain_secs"
        )
        await self._fail(cause)
        return False

    async def _record(self) -> bool:
        """Record that the batch's weights are unknown from here on; return whether to continue."""
        self._operation.enter(Step.RECORDING, trio.current_time())
        urls = [worker.url for worker in self._workers]
        if self._restores:
            self._progress.put(transitions.begin_restore(self._progress.now, urls))
            await self._progress.save()
            return True
        await self._read_former()
        state = self._progress.now
        if state.phase is not RolloutPhase.RUNNING:
            return False
        rows = [state.worker(url) for url in urls]
        self._redone = {row.url for row in rows if row.phase is not WorkerPhase.PENDING}
        # Put the new state before writing it: a pause or cancel during the write must not be lost.
        self._progress.put(transitions.begin(state, urls))
        try:
            await self._progress.record()
        except OSError as error:
            self._progress.put(transitions.undo_begin(self._progress.now, rows))
            path, reason = self._journal.path, error.strerror or error
            await self._fail(f"nothing was sent: the journal {path} can't be written: {reason}")
            return False
        return True

    async def _read_former(self) -> None:
        """Read the digests of the workers' present weights, to prove a later restore."""
        digests: dict[str, Digest | None] = {}

        async def read(worker: Worker) -> None:
            self._enter(worker, "reading")
            digests[worker.url] = await read_digest(worker, self._settings)

        pending = self._progress.now.urls(WorkerPhase.PENDING)
        async with trio.open_nursery() as nursery:
            for worker in self._workers if self._settings.verify else ():
                if worker.url in pending:
                    nursery.start_soon(read, worker)
        state = self._progress.now
        for url, digest in digests.items():
            former = state.worker(url).former
            if former is not None and digest is not None:
                state = transitions.record_former_version(
                    state, url, replace(former, digest=digest)
                )
        self._progress.put(state)

    # Update of one worker

    async def _update(self, worker: Worker) -> None:
        state, url = self._progress.now, worker.url
        source = WeightSource(
            state.label, state.path, state.load_format, self._context.find_stored(state.number)
        )
        before = worker.weight_version
        self._enter(worker, "loading")
        self._fleet.set_version(worker, None, 0)
        if state.number and source.version is None:
            await self._mark_uncertain(worker, f"version {state.number} is no longer in the store")
            return
        dialect = state.worker(url).dialect
        result = await self._context.updater.load(worker, dialect, source, self._settings)
        self._operation.on_result(result)
        if result.unchanged and url not in self._redone:
            self._fleet.set_version(worker, before.label, before.epoch)
            self._progress.put(transitions.refuse(self._progress.now, url, result.reason))
            await self._progress.save()
            _log.warning("rollout_refused worker=%s reason=%s", url, result.reason)
            self._release(worker)
            return
        digest, problem = None, "" if result.success else result.reason
        if not problem:
            digest, problem = await self._prove(worker, state.label, state.digest)
        if problem:
            await self._mark_uncertain(worker, problem)
        else:
            await self._publish(worker, digest)

    async def _prove(
        self, worker: Worker, label: str, expected: Digest | None
    ) -> tuple[Digest | None, str]:
        """Returns the worker's digest, and why it doesn't have the version, "" if it does."""
        self._enter(worker, "verifying")
        problem = await check_label(worker, label, self._settings)
        digest = None
        if not problem and self._settings.verify:
            digest = await read_digest(worker, self._settings)
            if differs(digest, expected):
                problem = f"its checksum differs from the recorded one of {label!r}"
        if not problem:
            self._enter(worker, "warming")
            problem = await warm_up(worker, self._settings)
        return digest, problem

    async def _publish(self, worker: Worker, digest: Digest | None) -> None:
        """Publish the version for the worker. The first worker's publication sets the epoch."""
        url = worker.url
        async with self._context.publishing:
            state = self._progress.now
            if differs(digest, state.digest):  # the digest of a worker that was updated meanwhile
                reason = f"its checksum differs from the recorded one of {state.label!r}"
                await self._mark_uncertain(worker, reason)
                return
            target = self._target(digest if digest is not None else state.digest)
            if state.epoch:
                await self._journal.extend(replace(target, epoch=state.epoch), [url])
                epoch = state.epoch
            else:
                epoch = (await self._journal.publish(target, [url])).epoch
            self._fleet.set_version(worker, state.label, epoch)
            self._fleet.cache_cleared(worker)
            self._journal.clear_uncertain([url])
            self._progress.put(transitions.succeed(self._progress.now, url, epoch, digest))
            await self._progress.save()
        _log.info("rollout_updated worker=%s version=%s epoch=%d", url, state.label, epoch)
        self._release(worker)

    def _target(self, digest: Digest | None) -> TargetVersion:
        state = self._progress.now
        formers = [row.former for row in state.workers]
        complete = all(former is not None for former in formers)
        labels = [former.label for former in formers if former is not None]
        return TargetVersion(
            label=state.label,
            is_new_label=complete and state.label not in labels,
            digest=digest.whole if digest is not None else "",
            models=(state.model,),
            path=state.path,
        )

    async def _mark_uncertain(self, worker: Worker, reason: str) -> None:
        """Mark the worker uncertain, so that it stays out of rotation, and roll back."""
        state = self._progress.now
        self._journal.mark_uncertain({worker.url: f"{state.name}: {reason}"})
        self._progress.put(transitions.mark_uncertain(state, worker.url, reason))
        await self._progress.save()
        self._release(worker)

    # Restore of one worker

    async def _restore(self, worker: Worker) -> None:
        row = self._progress.now.worker(worker.url)
        former = row.former
        if former is None:
            await self._record_unrestored(worker, row.reason or "its former version is not known")
            return
        # Before anything is sent, so that version probes don't expect the new version any more.
        await self._journal.withdraw({worker.url: former.target})
        source = WeightSource(
            former.label, former.path, "", self._context.find_stored(former.number)
        )
        if not source.path and source.version is None:
            await self._record_unrestored(
                worker, "its engine does not report the origin of its weights"
            )
            return
        self._enter(worker, "loading")
        self._fleet.set_version(worker, None, 0)
        result = await self._context.updater.load(worker, row.dialect, source, self._settings)
        self._operation.on_result(result)
        problem = "" if result.success else result.reason
        if not problem:
            _, problem = await self._prove(worker, former.label, former.digest)
        if problem:
            await self._record_unrestored(worker, problem)
        else:
            await self._return_restored(worker, former)

    async def _return_restored(self, worker: Worker, former: FormerVersion) -> None:
        self._fleet.set_version(worker, former.label, former.epoch)
        self._fleet.cache_cleared(worker)
        self._journal.clear_uncertain([worker.url])
        self._progress.put(transitions.restore(self._progress.now, worker.url))
        await self._progress.save()
        _log.info("rollout_restored worker=%s version=%s", worker.url, former.label)
        self._release(worker)

    async def _record_unrestored(self, worker: Worker, problem: str) -> None:
        state = self._progress.now
        earlier = state.worker(worker.url).reason
        reason = f"{earlier}; " if earlier and earlier != problem else ""
        self._journal.mark_uncertain(
            {worker.url: f"{state.name}: {reason}it could not be restored: {problem}"}
        )
        self._progress.put(
            transitions.fail_restore(state, worker.url, f"{reason}not restored: {problem}")
        )
        await self._progress.save()
        self._release(worker)

    async def _fail(self, cause: str) -> None:
        self._progress.put(transitions.fail(self._progress.now, cause))
        await self._progress.save()

    def _enter(self, worker: Worker, step: str) -> None:
        if self._progress.steps.get(worker.url) != step:
            self._progress.enter(worker.url, step)

    def _release(self, worker: Worker) -> None:
        """Remove the batch's cordons; other reasons, such as uncertain weights, remain."""
        self._enter(worker, "")
        for reason in (ROLLOUT_BATCH, UPDATING):
            if reason in worker.cordon_reasons:
                self._fleet.uncordon(worker, reason)
