"""Workers that come up without the published version, brought to it before they get a request.

    comes up ─hold─> what should it have? ─nothing of ours─────────────────────> let go
                          └─> has it? ─its digests say so──> noted ────────────> let go
                                └─> delivered from the store ─proven─> noted ──> let go
                                          └─failed, again and again─> uncertain, let go
    what it should have is not ours any more, meanwhile ────> left open: whoever reads labels judges
Invariant: from the moment in which it is found to be well until its tensors are proven, no request
goes to it. A sync that begins meanwhile is waited for, and what it publishes is what counts then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from omni_proxy.fleet.health import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.deliver import VersionDelivery, VersionRelay
from omni_proxy.weight_sync.operations.runner import OperationContext
from omni_proxy.weight_sync.operations.worker_calls import labels_of
from omni_proxy.weight_sync.protocol.published_version import TargetVersion
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.version_store import UnknownVersion

CATCHING_UP: Final = "catching_up"
AGAIN_SECS: Final = (1.0, 5.0, 25.0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a worker should have, and that we hold."""

    due: TargetVersion
    version: StoredVersion


class CatchUp:
    """`busy(worker)`: an operation is at it that will settle what it has."""

    def __init__(
        self,
        tools: OperationContext,
        shelf: StoreService,
        relay: VersionRelay,
        busy: Callable[[Worker], bool] = lambda _: False,
    ) -> None:
        self._fleet, self._config_store, self._book = tools.fleet, tools.config_store, tools.book
        self._shelf, self._relay, self._busy = shelf, relay, busy
        self._newest: dict[Worker, object] = {}
        self.caught_up = 0
        self.failed = 0
        self.nursery: trio.Nursery | None = None
        # Lets go of whom we have nothing for any more, though nobody knows what it has.
        self.leave_open: Callable[[Worker], None] = lambda w: self._fleet.uncordon(w, CATCHING_UP)
        self._fleet.watch_health(self._follow_health)
        self._fleet.watch_cache_cleared(self._follow_restart)

    def _follow_health(self, worker: Worker, before: Health) -> None:
        if worker.health.state is Health.HEALTHY:
            self.soon(worker)

    def _follow_restart(self, worker: Worker) -> None:
        """Whoever saw it begin anew has dropped its version; a flush does not."""
        if worker.weight_version is None:
            self.soon(worker)

    def hold(self, worker: Worker) -> None:
        """Until `soon` has seen to it."""
        if CATCHING_UP not in worker.cordon_reasons and self._here(worker):
            self._fleet.cordon(worker, CATCHING_UP)

    def soon(self, worker: Worker) -> None:
        """An atom: nothing is routed to it any more when this returns, if it may have to wait."""
        wanted = self._here(worker) and not self._busy(worker) and self._wanted(worker) is not None
        if self.nursery is not None and wanted:
            self._newest[worker] = asking = object()
            self.hold(worker)
            self.nursery.start_soon(self._bring, worker, asking)
        elif worker not in self._newest and CATCHING_UP in worker.cordon_reasons:
            self.leave_open(worker)

    def all_soon(self) -> None:
        """When we begin: whoever is well already."""
        for worker in self._fleet.workers:
            self.soon(worker)

    def _here(self, worker: Worker) -> bool:
        known = self._fleet.find(worker.url) is worker
        return known and worker.health.state is Health.HEALTHY

    def _wanted(self, worker: Worker) -> _Wanted | None:
        """None where the last update that was meant for it is none that we hold."""
        due = self._book.published.due_of(worker.url, worker.model)
        if due is None or due.waived:
            return None
        held = [version for version in self._shelf.versions() if version.epoch == due.epoch]
        return _Wanted(due, held[0]) if held else None

    async def _bring(self, worker: Worker, asking: object) -> None:
        settled = False
        try:
            settled = await self._brought(worker, asking)
        finally:
            if self._newest.get(worker) is asking:
                del self._newest[worker]
                if not settled:
                    self.leave_open(worker)
                elif CATCHING_UP in worker.cordon_reasons:
                    self._fleet.uncordon(worker, CATCHING_UP)

    async def _brought(self, worker: Worker, asking: object) -> bool:
        """Whether it is known what it has: that is noted, or it is uncertain."""
        pauses = iter(AGAIN_SECS)
        while self._here(worker) and self._newest.get(worker) is asking:
            await self._config_store.membership_lock.wait_released()
            wanted = self._wanted(worker)
            if wanted is None:
                return False
            if await self._has(worker, wanted):
                return True
            async with self._config_store.operation_lock:
                if self._wanted(worker) != wanted or self._config_store.membership_lock.held:
                    continue  # a newer one is coming, or came
                await self._fleet.await_replicated()
                why = await self._give(worker, wanted)
            if not why:
                return True
            _log.warning("Worker %s did not catch up: %s", worker.url, why)
            if (pause := next(pauses, None)) is None:
                await self._give_up(worker, wanted, why)
                return True
            await trio.sleep(pause)
        return False

    async def _has(self, worker: Worker, wanted: _Wanted) -> bool:
        """Whether it is proven to hold it already; noted then."""
        due = wanted.due
        label = (await labels_of([worker], {}))[worker]
        proof = await self._relay.prove(wanted.version, worker, {}, self._limit)
        # One that can't be hashed may still say what only that version is called.
        proven = label == due.label if proof.proven else due.proven_by(label)
        if proof.differs or not proven or self._wanted(worker) != wanted:
            return False
        await self._note(worker, due)
        return True

    async def _give(self, worker: Worker, wanted: _Wanted) -> str:
        """Why it could not take it, "" where it has it now."""
        due, version = wanted.due, wanted.version
        how = VersionDelivery(due.label, self._book.standing_still, limit=self._limit)
        try:
            (answer,) = await self._relay.deliver(version, [worker], how)
        except (UnknownVersion, OSError) as error:
            return f"{version.name} can't be read: {error}"
        if not answer.success:
            return answer.why
        self.caught_up += 1
        _log.info("Worker %s has caught up to %s", worker.url, version.name)
        await self._note(worker, due)
        self._fleet.cache_cleared(worker)
        return ""

    @property
    def _limit(self) -> float:
        return self._config_store.config.admin.worker_timeout_secs

    async def _note(self, worker: Worker, due: TargetVersion) -> None:
        self._fleet.set_version(worker, due.label, due.epoch)
        if worker.url in self._book.reasons:
            self._book.clear([worker.url])
            await self._book.keep()

    async def _give_up(self, worker: Worker, wanted: _Wanted, why: str) -> None:
        self.failed += 1
        reason = f"missed the update of epoch {wanted.due.epoch} and did not catch up: {why}"
        self._book.mark({worker.url: reason})
        await self._book.keep()
