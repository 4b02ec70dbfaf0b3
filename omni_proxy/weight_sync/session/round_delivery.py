"""Delivery in a round: seals what the proxy's own rank received, and delivers it to workers.

Invariant: a version is delivered only once it is complete in the store; the store's current
version is the published one, never just the received one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.deliver import DeliveryOptions
from omni_proxy.weight_sync.delivery.proxy_rank import NAME
from omni_proxy.weight_sync.delivery.service import VersionService
from omni_proxy.weight_sync.session.lifecycle import SessionLifecycle
from omni_proxy.weight_sync.session.verification import (
    CachedProof,
    cached_proof,
    read_instances,
)
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.version_store import UnknownVersion

REFUSED_STATUS = 400
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """`took`: workers that have the version now; `failed`: URL to reason."""

    took: tuple[Worker, ...]
    failed: Mapping[str, str]


class RoundDelivery:
    """`version`: of the present round. `results`: of its deliveries, by worker URL.

    `proofs`: what workers proved with a delivery.
    """

    def __init__(self, lifecycle: SessionLifecycle, version_service: VersionService) -> None:
        self._lifecycle = lifecycle
        self._version_service = version_service
        self.version: StoredVersion | None = None
        self.results: dict[str, WorkerResult] = {}
        self.proofs: dict[Worker, CachedProof] = {}
        self.error = ""  # why there is no version although data was received
        self._late: list[Worker] = []

    def recipients(self) -> list[Worker]:
        """Healthy workers, if only the proxy's rank was in the group; others catch up later."""
        if NAME not in self._lifecycle.session.members or self._lifecycle.workers:
            return []
        workers = self._lifecycle.fleet.workers
        return [worker for worker in workers if worker.health.state is Health.HEALTHY]

    def cordon_late_workers(self) -> None:
        """Cordon workers that came up during the round, before others get the new version."""
        if self.version is not None:
            lifecycle = self._lifecycle
            members = (*lifecycle.workers, *lifecycle.recipients)
            targets = {*self.results, *(worker.url for worker in members)}
            self._late = [w for w in lifecycle.fleet.workers if w.url not in targets]
            for worker in self._late:
                self._version_service.catch_up.cordon(worker)

    def begin(self) -> None:
        """A new round is being closed."""
        self.version, self.results, self.proofs, self.error = None, {}, {}, ""

    @property
    def received(self) -> bool:
        """Whether the proxy's rank took part, and received everything."""
        member = self._lifecycle.session.members.get(NAME)
        return member is not None and not member.failed

    @property
    def previous(self) -> StoredVersion | None:
        """The version of all workers before this round; None if it is not in the store."""
        current = self._version_service.store_service.current
        epoch = self._lifecycle.journal.published.epoch
        return current if current is not None and current.epoch == epoch else None

    async def seal(self, label: str | None) -> None:
        """Also if no worker needs a delivery: workers that come up later will."""
        try:
            self.version = await self._version_service.proxy_rank.seal(label)
        except (OSError, LookupError) as error:
            self.error = f"what was received could not be kept: {error}"
            _log.error("version_seal_failed error=%r", str(error))

    async def deliver(
        self, version: StoredVersion, workers: Sequence[Worker], headers: Mapping[str, str]
    ) -> DeliveryResult:
        """To each of the workers that is alive."""
        lifecycle = self._lifecycle
        self._version_service.prefetch.end()
        config = lifecycle.config_store.config
        options = DeliveryOptions(
            paused=lifecycle.journal.all_paused,
            prove=config.weight_sync.verify == "checksum",
            headers=headers,
            limit=config.admin.worker_timeout_secs,
        )
        alive = [worker for worker in workers if worker.health.state is not Health.DEAD]
        failed = {worker.url: "it is dead" for worker in workers if worker not in alive}
        instances = await read_instances(alive, headers) if options.prove else {}
        try:
            results = await self._version_service.deliverer.deliver(version, alive, options)
        except (UnknownVersion, OSError) as error:
            reason = f"{version.name} can't be read: {error}"
            results = [WorkerResult(worker.url, None, error=reason) for worker in alive]
        self.results |= {result.worker: result for result in results}
        for worker, result in zip(alive, results, strict=True):
            self.proofs.pop(worker, None)
            if (proof := cached_proof(result, version, instances.get(worker, ""))) is not None:
                self.proofs[worker] = proof
        failed |= {result.worker: result.why for result in results if not result.success}
        return DeliveryResult(tuple(worker for worker in alive if worker.url not in failed), failed)

    def refuse(self, workers: Sequence[Worker], reason: str) -> DeliveryResult:
        """No worker gets the version: all keep what they have."""
        body = {"success": False, "status": "error", "message": reason}
        results = [WorkerResult(worker.url, REFUSED_STATUS, body) for worker in workers]
        self.results |= {result.worker: result for result in results}
        return DeliveryResult((), {worker.url: reason for worker in workers})

    async def published(self, version: StoredVersion, label: str | None, epoch: int) -> None:
        await self._version_service.store_service.published(version, label, epoch)
        late, self._late = self._late, []
        for worker in late:
            self._version_service.catch_up.start(worker)

    async def discard_received(self) -> None:
        """The round will not be closed: discard what was received."""
        await self._version_service.proxy_rank.discard()

    async def discard(self) -> None:
        """No worker has the version: discard it."""
        version, self.version = self.version, None
        store = self._version_service.store_service.store
        if version is not None and store is not None:
            await self._version_service.store_service.run_in_thread(store.discard, version)
