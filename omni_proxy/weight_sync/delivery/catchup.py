"""Catch-up: updates workers that become healthy without the published version.

    healthy ─cordon─> target version? ─neither stored nor from a path────────> uncordon
                          └─> has it? ─its digests prove it──> recorded ───> uncordon
                                └─> delivered, or loaded ─proven─> recorded ──> uncordon
                                          └─failed repeatedly─> uncertain, uncordon
    the target was deleted from the store ────> left to the version probe
Invariant: such a worker gets no request from the moment it is healthy until its tensors are proven.
If a sync begins during the catch-up, it is waited for, and its version becomes the target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from omni_proxy.fleet.cordon_reasons import CATCHING_UP
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.deliver import DeliveryOptions, VersionDeliverer
from omni_proxy.weight_sync.delivery.worker_update import (
    CannotUpdate,
    UpdateSettings,
    WeightSource,
    WorkerUpdater,
    check_label,
    inspect,
    read_digest,
    warm_up,
)
from omni_proxy.weight_sync.protocol.published_version import TargetVersion
from omni_proxy.weight_sync.state_journal import OperationContext
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.version_store import UnknownVersion
from omni_proxy.weight_sync.worker_calls import limit_secs, read_labels

RETRY_SECS: Final = (1.0, 5.0, 25.0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _ReachableTarget:
    """The version that a worker should have; `version` is None if it loads from a path."""

    expected: TargetVersion
    version: StoredVersion | None


class CatchUp:
    """Runs catch-ups. `busy(worker)`: an operation runs on it and will set its version."""

    def __init__(
        self,
        context: OperationContext,
        store_service: StoreService,
        deliverer: VersionDeliverer,
        busy: Callable[[Worker], bool] = lambda _: False,
    ) -> None:
        self._fleet, self._config_store = context.fleet, context.config_store
        self._journal = context.journal
        self._store_service, self._deliverer, self._busy = store_service, deliverer, busy
        self._latest: dict[Worker, object] = {}  # token of the latest run; older ones stop
        self.caught_up = 0
        self.failed = 0
        self.nursery: trio.Nursery | None = None
        # Called for a worker that can't catch up, because its target is not in the store; it has to
        # uncordon the worker.
        self.on_unavailable: Callable[[Worker], None] = lambda w: self._fleet.uncordon(
            w, CATCHING_UP
        )
        self._fleet.watch_health(self._on_health_change)
        self._fleet.watch_cache_cleared(self._on_cache_cleared)

    def _on_health_change(self, worker: Worker, before: Health) -> None:
        if worker.health.state is Health.HEALTHY:
            self.start(worker)

    def _on_cache_cleared(self, worker: Worker) -> None:
        """Catch up after a restart, which clears the version; a flush does not."""
        if worker.weight_label is None:
            self.start(worker)

    def cordon(self, worker: Worker) -> None:
        """Cordon the worker until the catch-up that `start` begins has ended."""
        if CATCHING_UP not in worker.cordon_reasons and self._fleet.has_healthy(worker):
            self._fleet.cordon(worker, CATCHING_UP)

    def start(self, worker: Worker) -> None:
        """Start a catch-up without waiting; on return the worker is cordoned if it needs one."""
        starts = self._fleet.has_healthy(worker) and not self._busy(worker)
        if self.nursery is not None and starts and self._target(worker) is not None:
            self._latest[worker] = token = object()
            self.cordon(worker)
            self.nursery.start_soon(self._run, worker, token)
        elif worker not in self._latest and CATCHING_UP in worker.cordon_reasons:
            self.on_unavailable(worker)

    def start_all(self) -> None:
        """Start catch-ups for workers that were healthy before the service started."""
        for worker in self._fleet.workers:
            self.start(worker)

    def _target(self, worker: Worker) -> _ReachableTarget | None:
        """The worker's target version; None if it is neither stored nor loads from a path."""
        target = self._journal.published.target_for(worker.url, worker.model)
        if target is None or target.waived:
            return None
        versions = [v for v in self._store_service.versions() if v.epoch == target.epoch]
        if not versions and not target.path:
            return None
        return _ReachableTarget(target, versions[0] if versions else None)

    async def _run(self, worker: Worker, token: object) -> None:
        decided = False
        try:
            decided = await self._catch_up(worker, token)
        finally:
            if self._latest.get(worker) is token:
                del self._latest[worker]
                if not decided:
                    self.on_unavailable(worker)
                elif CATCHING_UP in worker.cordon_reasons:
                    self._fleet.uncordon(worker, CATCHING_UP)

    async def _catch_up(self, worker: Worker, token: object) -> bool:
        """Returns whether the worker's version was recorded or the worker marked uncertain."""
        pauses = iter(RETRY_SECS)
        lock = self._config_store.membership_lock
        while self._fleet.has_healthy(worker) and self._latest.get(worker) is token:
            await lock.wait_released()
            target = self._target(worker)
            if target is None:
                return False
            if await self._has_version(worker, target):
                return True
            async with self._config_store.operation_lock:
                if self._target(worker) != target or lock.held:
                    continue  # a newer version is being published, or was published
                await self._fleet.await_held()
                reason = await self._deliver(worker, target)
            if not reason:
                return True
            _log.warning("catch_up_failed worker=%s error=%s", worker.url, reason)
            if (pause := next(pauses, None)) is None:
                await self._give_up(worker, target, reason)
                return True
            await trio.sleep(pause)
        return False

    async def _has_version(self, worker: Worker, target: _ReachableTarget) -> bool:
        """Whether the worker is proven to have the version already; if so, record it."""
        expected = target.expected
        label = (await read_labels([worker], {}))[worker]
        if target.version is None:
            digest_differs = label == expected.label and await self._has_other_digest(
                worker, expected
            )
            if label != expected.label or digest_differs or self._target(worker) != target:
                return False
            await self._record(worker, expected)
            return True
        proof = await self._deliverer.prove(target.version, worker, {}, self._limit)
        # A worker without digests may still report a label that only this version has.
        proven = label == expected.label if proof.proven else expected.is_proven_by(label)
        if proof.differs or not proven or self._target(worker) != target:
            return False
        await self._record(worker, expected)
        return True

    async def _has_other_digest(self, worker: Worker, expected: TargetVersion) -> bool:
        """Whether the digest differs from the expected one; False if the label is a proof."""
        if expected.is_new_label or not expected.digest:
            return False
        digest = await read_digest(worker, self._settings)
        return digest is not None and bool(digest.whole) and digest.whole != expected.digest

    async def _load(self, worker: Worker, expected: TargetVersion) -> str:
        """Load the version from the rollout's path. Returns why that failed, or ""."""
        source = WeightSource(expected.label or "", expected.path)
        try:
            facts = await inspect(worker, {})
        except CannotUpdate as error:
            return str(error)
        updater = WorkerUpdater(self._deliverer)
        result = await updater.load(worker, facts.dialect, source, self._settings)
        if not result.success:
            return result.reason
        problem = await check_label(worker, source.label, self._settings)
        if not problem and expected.digest and self._settings.verify:
            digest = await read_digest(worker, self._settings)
            if digest is not None and digest.whole and digest.whole != expected.digest:
                problem = f"its checksum is {digest.whole}, not {expected.digest}"
        problem = problem or await warm_up(worker, self._settings)
        if problem:
            return problem
        self.caught_up += 1
        _log.info("worker_caught_up worker=%s version=%s", worker.url, expected.label)
        await self._record(worker, expected)
        self._fleet.cache_cleared(worker)
        return ""

    @property
    def _settings(self) -> UpdateSettings:
        config = self._config_store.config
        return UpdateSettings(limit_secs(self._limit), config.weight_sync.verify == "checksum")

    async def _deliver(self, worker: Worker, target: _ReachableTarget) -> str:
        """Deliver the version. Returns why that failed, or ""."""
        expected, version = target.expected, target.version
        if version is None:
            return await self._load(worker, expected)
        options = DeliveryOptions(expected.label, self._journal.all_paused, limit=self._limit)
        try:
            (result,) = await self._deliverer.deliver(version, [worker], options)
        except (UnknownVersion, OSError) as error:
            return f"{version.name} can't be read: {error}"
        if not result.success:
            return result.reason
        self.caught_up += 1
        _log.info("worker_caught_up worker=%s version=%s", worker.url, version.name)
        await self._record(worker, expected)
        self._fleet.cache_cleared(worker)
        return ""

    @property
    def _limit(self) -> float:
        return self._config_store.config.admin.worker_timeout_secs

    async def _record(self, worker: Worker, target: TargetVersion) -> None:
        self._fleet.set_version(worker, target.label, target.epoch)
        if worker.url in self._journal.uncertain:
            self._journal.clear_uncertain([worker.url])
            await self._journal.save()

    async def _give_up(self, worker: Worker, target: _ReachableTarget, problem: str) -> None:
        self.failed += 1
        epoch = target.expected.epoch
        reason = f"missed the update of epoch {epoch} and did not catch up: {problem}"
        self._journal.mark_uncertain({worker.url: reason})
        await self._journal.save()
