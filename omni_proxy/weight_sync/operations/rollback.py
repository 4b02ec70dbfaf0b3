"""Back to a version that is kept: an update of all workers whose weights come from our store.

It takes its turn, is written down, drains, and is proven and published like every other update: the
label is that of then, the epoch a new one. Invariant: the store calls it current only once the
workers have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse, WorkerResult
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.deliver import VersionDelivery, VersionRelay
from omni_proxy.weight_sync.operations.runner import AdminCall, OperationContext, OperationRunner
from omni_proxy.weight_sync.protocol.checksum_agreement import Verdict
from omni_proxy.weight_sync.protocol.published_version import PublishedVersion
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.version_store import UnknownVersion, VersionStore
from omni_proxy.wire.errors import HttpError


@dataclass(frozen=True, slots=True)
class RollbackSource:
    """Where versions come from."""

    shelf: StoreService
    relay: VersionRelay

    async def wanted(self, call: AdminCall) -> StoredVersion:
        """What the call names, by default the one before the current. Raises HttpError 404, 503."""
        store = await self.store()
        wanted = call.says("version")
        if wanted is None:
            if store.previous is None:
                raise _unknown("there is no version before the current one", store)
            return store.previous
        try:
            if isinstance(wanted, bool) or not isinstance(wanted, int | str):
                raise HttpError(400, "version must be a number or a label", "invalid_version")
            return store.find(wanted)
        except UnknownVersion as error:
            raise _unknown(str(error), store) from None

    async def store(self) -> VersionStore:
        """Raises HttpError 503 where there is none."""
        if not self.shelf.wanted and self.shelf.store is None:
            message = 'no versions are kept: [weight_sync] mode is neither "receive" nor "both"'
            raise HttpError(404, message, "no_versions", detail=message)
        try:
            return await self.shelf.open()
        except OSError as error:
            message = f"the versions can't be read: {self.shelf.error or error}"
            raise HttpError(503, message, "versions_unavailable", detail=message) from None


class Rollback(OperationRunner):
    """`run` once, with the turn in hand."""

    def __init__(
        self, tools: OperationContext, call: AdminCall, operation: Operation, source: RollbackSource
    ) -> None:
        super().__init__(tools, call, operation)
        self._source = source
        self._version: StoredVersion | None = None

    async def run(self, workers: Sequence[Worker]) -> AdminResponse:
        """Raises HttpError; then nothing was sent."""
        self._version = await self._source.wanted(self._call)
        try:
            # What is there now is so when the drain is over, whatever is collected meanwhile.
            async with self._source.shelf.lease(self._version):
                return await super().run(workers)
        except UnknownVersion as error:
            raise _unknown(str(error), await self._source.store()) from None

    async def _ask(self, workers: Sequence[Worker]) -> list[WorkerResult]:
        version = self._version
        assert version is not None
        how = VersionDelivery(
            paused=self._book.standing_still,
            prove=self._config.weight_sync.verify == "checksum",
            headers=self._call.credentials,
            limit=self._config.admin.worker_timeout_secs,
        )
        try:
            answers = await self._source.relay.deliver(version, workers, how)
        except (UnknownVersion, OSError) as error:
            why = f"{version.name} can't be read: {error}"
            answers = [WorkerResult(worker.url, None, error=why) for worker in workers]
        for answer in answers:
            self._operation.hear(answer)
        return answers

    async def _publish(
        self, labels: Mapping[Worker, str | None], verdict: Verdict
    ) -> PublishedVersion:
        published = await super()._publish(labels, verdict)
        if self._version is not None and not verdict.mismatched:
            await self._source.shelf.published(self._version, published.label, published.epoch)
        return published


def _unknown(message: str, store: VersionStore) -> HttpError:
    known = [version.told(current=version == store.current) for version in store.versions()]
    return HttpError(404, message, "unknown_version", detail=message, versions=known)
