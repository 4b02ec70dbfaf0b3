"""Back to a version that is kept: an update of all workers whose weights come from our store.

It takes its turn, is written down, drains, and is proven and published like every other update: the
label is that of then, the epoch a new one. Invariant: the store calls it current only once the
workers have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni_proxy.control.agreement import Verdict
from omni_proxy.control.operation import Operation
from omni_proxy.control.outcomes import Answer, WorkerAnswer
from omni_proxy.control.published import Published
from omni_proxy.fleet.worker import Worker
from omni_proxy.weights.relay import Delivery, Relay
from omni_proxy.weights.store.record import Version
from omni_proxy.weights.store.shelf import Shelf
from omni_proxy.weights.store.versions import UnknownVersion, VersionStore
from omni_proxy.weights.work import AdminCall, Tools, Work
from omni_proxy.wire.errors import Refusal


@dataclass(frozen=True, slots=True)
class Source:
    """Where versions come from."""

    shelf: Shelf
    relay: Relay

    async def wanted(self, call: AdminCall) -> Version:
        """What the call names, by default the one before the current. Raises Refusal 404, 503."""
        store = await self.store()
        wanted = call.says("version")
        if wanted is None:
            if store.previous is None:
                raise _unknown("there is no version before the current one", store)
            return store.previous
        try:
            if isinstance(wanted, bool) or not isinstance(wanted, int | str):
                raise Refusal(400, "version must be a number or a label", "invalid_version")
            return store.find(wanted)
        except UnknownVersion as error:
            raise _unknown(str(error), store) from None

    async def store(self) -> VersionStore:
        """Raises Refusal 503 where there is none."""
        if not self.shelf.wanted and self.shelf.store is None:
            message = 'no versions are kept: [weight_sync] mode is neither "receive" nor "both"'
            raise Refusal(404, message, "no_versions", detail=message)
        try:
            return await self.shelf.open()
        except OSError as error:
            message = f"the versions can't be read: {self.shelf.error or error}"
            raise Refusal(503, message, "versions_unavailable", detail=message) from None


class Rollback(Work):
    """`run` once, with the turn in hand."""

    def __init__(self, tools: Tools, call: AdminCall, operation: Operation, source: Source) -> None:
        super().__init__(tools, call, operation)
        self._source = source
        self._version: Version | None = None

    async def run(self, workers: Sequence[Worker]) -> Answer:
        """Raises Refusal; then nothing was sent."""
        self._version = await self._source.wanted(self._call)
        try:
            # What is there now is so when the drain is over, whatever is collected meanwhile.
            async with self._source.shelf.lease(self._version):
                return await super().run(workers)
        except UnknownVersion as error:
            raise _unknown(str(error), await self._source.store()) from None

    async def _ask(self, workers: Sequence[Worker]) -> list[WorkerAnswer]:
        version = self._version
        assert version is not None
        how = Delivery(
            paused=self._book.standing_still,
            prove=self._config.weight_sync.verify == "checksum",
            headers=self._call.credentials,
            limit=self._config.admin.worker_timeout_secs,
        )
        try:
            answers = await self._source.relay.deliver(version, workers, how)
        except (UnknownVersion, OSError) as error:
            why = f"{version.name} can't be read: {error}"
            answers = [WorkerAnswer(worker.url, None, error=why) for worker in workers]
        for answer in answers:
            self._operation.hear(answer)
        return answers

    async def _publish(self, labels: Mapping[Worker, str | None], verdict: Verdict) -> Published:
        published = await super()._publish(labels, verdict)
        if self._version is not None and not verdict.mismatched:
            await self._source.shelf.published(self._version, published.label, published.epoch)
        return published


def _unknown(message: str, store: VersionStore) -> Refusal:
    known = [version.told(current=version == store.current) for version in store.versions()]
    return Refusal(404, message, "unknown_version", detail=message, versions=known)
