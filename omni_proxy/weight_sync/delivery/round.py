"""What our own rank received in a round: sealed as a version, brought to who was not in the group,
and what is done where not everybody took it.

Invariant: a version is given out only once it is whole in the store; which one the store calls
current is decided by what was published, not by what was received.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.deliver import VersionDelivery
from omni_proxy.weight_sync.delivery.proxy_rank import NAME
from omni_proxy.weight_sync.delivery.service import VersionService
from omni_proxy.weight_sync.session.lifecycle import SessionLifecycle
from omni_proxy.weight_sync.session.verification import CachedProof, instances_of, known_by
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.version_store import UnknownVersion

NOT_GIVEN = 400
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """`took`: who has it now; `failed`: URL to why it has not."""

    took: tuple[Worker, ...]
    failed: Mapping[str, str]


class RoundDelivery:
    """`version`: of the present round. `answers`: what workers said to a delivery of it, by URL.

    `known`: what they have proven with that.
    """

    def __init__(self, life: SessionLifecycle, holding: VersionService) -> None:
        self._life = life
        self._holding = holding
        self.version: StoredVersion | None = None
        self.answers: dict[str, WorkerResult] = {}
        self.known: dict[Worker, CachedProof] = {}
        self.error = ""  # why there is no version though something was received
        self._late: list[Worker] = []

    def recipients(self) -> list[Worker]:
        """Who is well, where only a rank of ours was in the group; others catch up later."""
        if NAME not in self._life.session.parts or self._life.workers:
            return []
        workers = self._life.fleet.workers
        return [worker for worker in workers if worker.health.state is Health.HEALTHY]

    def hold_back(self) -> None:
        """Who came up meanwhile gets no request from the moment on in which others have more."""
        if self.version is not None:
            life = self._life
            asked = {*self.answers, *(worker.url for worker in (*life.workers, *life.recipients))}
            self._late = [worker for worker in life.fleet.workers if worker.url not in asked]
            for worker in self._late:
                self._holding.catch_up.hold(worker)

    def begin(self) -> None:
        """A new round is being closed."""
        self.version, self.answers, self.known, self.error = None, {}, {}, ""

    @property
    def received(self) -> bool:
        """Whether a rank of ours took part, and got everything."""
        part = self._life.session.parts.get(NAME)
        return part is not None and not part.failed

    @property
    def previous(self) -> StoredVersion | None:
        """What all had before this round; None where that came from elsewhere."""
        current = self._holding.shelf.current
        same = current is not None and current.epoch == self._life.book.published.epoch
        return current if same else None

    async def seal(self, label: str | None) -> None:
        """Also where nobody needs it from us: who comes later will."""
        try:
            self.version = await self._holding.own.seal(label)
        except (OSError, LookupError) as error:
            self.error = f"what was received could not be kept: {error}"
            _log.error("%s", self.error)

    async def give(
        self, version: StoredVersion, workers: Sequence[Worker], headers: Mapping[str, str]
    ) -> DeliveryResult:
        """To each of them; whoever is dead is not asked."""
        life = self._life
        self._holding.ahead.end()
        config = life.config_store.config
        how = VersionDelivery(
            paused=life.book.standing_still,
            prove=config.weight_sync.verify == "checksum",
            headers=headers,
            limit=config.admin.worker_timeout_secs,
        )
        alive = [worker for worker in workers if worker.health.state is not Health.DEAD]
        failed = {worker.url: "it is dead" for worker in workers if worker not in alive}
        instances = await instances_of(alive, headers) if how.prove else {}
        try:
            answers = await self._holding.relay.deliver(version, alive, how)
        except (UnknownVersion, OSError) as error:
            why = f"{version.name} can't be read: {error}"
            answers = [WorkerResult(worker.url, None, error=why) for worker in alive]
        self.answers |= {answer.worker: answer for answer in answers}
        for worker, answer in zip(alive, answers, strict=True):
            self.known.pop(worker, None)
            if (known := known_by(answer, version, instances.get(worker, ""))) is not None:
                self.known[worker] = known
        failed |= {answer.worker: answer.why for answer in answers if not answer.success}
        return DeliveryResult(tuple(worker for worker in alive if worker.url not in failed), failed)

    def refused(self, workers: Sequence[Worker], why: str) -> DeliveryResult:
        """Nobody was given it: all have what they had."""
        body = {"success": False, "status": "error", "message": why}
        answers = [WorkerResult(worker.url, NOT_GIVEN, body) for worker in workers]
        self.answers |= {answer.worker: answer for answer in answers}
        return DeliveryResult((), {worker.url: why for worker in workers})

    async def published(self, version: StoredVersion, label: str | None, epoch: int) -> None:
        await self._holding.shelf.published(version, label, epoch)
        late, self._late = self._late, []
        for worker in late:
            self._holding.catch_up.soon(worker)

    async def forget(self) -> None:
        """The round will not be closed: what came of it is of no use."""
        await self._holding.own.discard()

    async def discard(self) -> None:
        """Nobody has it."""
        version, self.version = self.version, None
        store = self._holding.shelf.store
        if version is not None and store is not None:
            await self._holding.shelf.in_thread(store.discard, version)
