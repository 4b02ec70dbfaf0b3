"""Rollback: updates all workers to an older version of the store, by the steps of `runner`.

The version keeps its old label and gets a new epoch. Invariant: the store marks it as current only
once the workers have it, and does not delete it while the operation drains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse, WorkerResult
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.deliver import DeliveryOptions, VersionDeliverer
from omni_proxy.weight_sync.operations.runner import OperationRunner
from omni_proxy.weight_sync.protocol.checksum_agreement import Verdict
from omni_proxy.weight_sync.protocol.published_version import PublishedVersion
from omni_proxy.weight_sync.state_journal import OperationContext
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.version_store import UnknownVersion, VersionStore
from omni_proxy.weight_sync.worker_calls import AdminCall
from omni_proxy.wire.errors import HttpError


@dataclass(frozen=True, slots=True)
class RollbackSource:
    """Finds the version to roll back to, and delivers it."""

    store_service: StoreService
    deliverer: VersionDeliverer

    async def find_version(self, call: AdminCall) -> StoredVersion:
        """Return the version that the call names, by default the one before the current version.

        Raises HttpError 400, 404, 503.
        """
        store = await self.open_store()
        requested = call.body_field("version")
        if requested is None:
            if store.previous is None:
                raise unknown_version("there is no version before the current one", store)
            return store.previous
        try:
            if isinstance(requested, bool) or not isinstance(requested, int | str):
                raise HttpError(400, "version must be a number or a label", "invalid_version")
            return store.find(requested)
        except UnknownVersion as error:
            raise unknown_version(str(error), store) from None

    async def open_store(self) -> VersionStore:
        """Raises HttpError 404 if no versions are kept, 503 if they cannot be read."""
        if not self.store_service.enabled and self.store_service.store is None:
            message = 'no versions are kept: [weight_sync] mode is neither "receive" nor "both"'
            raise HttpError(404, message, "no_versions", detail=message)
        try:
            return await self.store_service.open()
        except OSError as error:
            message = f"the versions can't be read: {self.store_service.error or error}"
            raise HttpError(503, message, "versions_unavailable", detail=message) from None


class Rollback(OperationRunner):
    """Updates all workers to a stored version: call `run` once, while holding the lock."""

    def __init__(
        self,
        context: OperationContext,
        call: AdminCall,
        operation: Operation,
        source: RollbackSource,
    ) -> None:
        super().__init__(context, call, operation)
        self._source = source
        self._version: StoredVersion | None = None

    async def run(self, workers: Sequence[Worker]) -> AdminResponse:
        """Raises HttpError before any call is sent."""
        self._version = await self._source.find_version(self._call)
        try:
            # The lease keeps the store from deleting the version while the operation drains.
            async with self._source.store_service.lease(self._version):
                return await super().run(workers)
        except UnknownVersion as error:
            raise unknown_version(str(error), await self._source.open_store()) from None

    async def _call_workers(self, workers: Sequence[Worker]) -> list[WorkerResult]:
        version = self._version
        assert version is not None
        options = DeliveryOptions(
            paused=self._journal.all_paused,
            prove=self._config.weight_sync.verify == "checksum",
            headers=self._call.credentials,
            limit=self._config.admin.worker_timeout_secs,
        )
        try:
            results = await self._source.deliverer.deliver(version, workers, options)
        except (UnknownVersion, OSError) as error:
            reason = f"{version.name} can't be read: {error}"
            results = [WorkerResult(worker.url, None, error=reason) for worker in workers]
        for result in results:
            self._operation.on_result(result)
        return results

    async def _publish(
        self, labels: Mapping[Worker, str | None], verdict: Verdict
    ) -> PublishedVersion:
        published = await super()._publish(labels, verdict)
        if self._version is not None and not verdict.mismatched:
            store = self._source.store_service
            await store.published(self._version, published.label, published.epoch)
        return published


def unknown_version(message: str, store: VersionStore) -> HttpError:
    versions = [version.to_dict(current=version == store.current) for version in store.versions()]
    return HttpError(404, message, "unknown_version", detail=message, versions=versions)
