"""Which weights each worker has, as it says itself: asked when it comes up, or was restarted.

Invariant: an epoch is never believed of a worker whose label does not prove it; of an unknown label
nobody says that it is the old one. Who comes up without the weights of the last update that was
meant for it is uncertain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from omni_proxy.admin_ops.results import NOT_FLUSHED
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.start_throttle import StartThrottle
from omni_proxy.weight_sync.operations.resume import forgets, go_on
from omni_proxy.weight_sync.operations.state_journal import StateJournal
from omni_proxy.weight_sync.operations.worker_calls import compare_checksums, labels_of
from omni_proxy.weight_sync.protocol.published_version import TargetVersion

AGAIN_SECS = 5.0
CHECKSUM_SECS = 300.0
ASKED_AT_ONCE: Final = 64  # of a fleet that comes up; one that keeps us waiting stops no other
TURNS_EACH: Final = 4  # of the event loop: probes go first, for a label keeps nobody waiting
UNPROVEN: Final = "unproven"
_log = logging.getLogger(__name__)


class VersionProbe:
    """`busy(worker)`: an operation is at it, and will read its label back itself.

    `may_hash()`: whether a worker may be stopped for as long as hashing takes. `strict()`: whether
    who comes up is kept out of routing until it has told what it has.
    """

    def __init__(
        self,
        fleet: Fleet,
        book: StateJournal,
        busy: Callable[[Worker], bool],
        may_hash: Callable[[], bool],
        strict: Callable[[], bool] = lambda: False,
    ) -> None:
        self._fleet = fleet
        self._book = book
        self._busy = busy
        self._may_hash = may_hash
        self._strict = strict
        self._newest: dict[Worker, object] = {}
        self._places = trio.CapacityLimiter(ASKED_AT_ONCE)
        self._pace = StartThrottle(TURNS_EACH)
        self.nursery: trio.Nursery | None = None
        fleet.watch_health(lambda worker, _: self.ask_soon(worker, came_up=True))
        fleet.watch_cache_cleared(self.ask_soon)

    def start(self, nursery: trio.Nursery) -> None:
        """Whoever has come up already is kept out since, and asked now."""
        self.nursery = nursery
        for worker in self._fleet.workers:
            if self._busy(worker):
                self._let_go(worker)
            elif self._owes(worker):
                self.ask_soon(worker, came_up=True)

    def ask_soon(self, worker: Worker, *, came_up: bool = False) -> None:
        """Without a known label it has come up, too: whoever saw its restart dropped that."""
        if not self._here(worker) or self._busy(worker):
            return
        self.hold(worker)
        if self.nursery is not None:
            self._newest[worker] = asking = object()
            self.nursery.start_soon(self._ask, worker, asking, came_up)

    def hold(self, worker: Worker) -> None:
        """Until `ask_soon` has heard from it, where that is what we wait for."""
        held = UNPROVEN in worker.cordon_reasons or worker.url in self._book.reasons
        if self._here(worker) and self._strict() and self._owes(worker) and not held:
            self._fleet.cordon(worker, UNPROVEN)

    def _owes(self, worker: Worker) -> bool:
        """There was an update for it, and nobody knows whether it has that."""
        due = self._due(worker)
        return due is not None and not due.waived and worker.weight_epoch != due.epoch

    def learn(self, worker: Worker, label: str | None) -> None:
        """It told its label, and no operation is at it."""
        if self._busy(worker) or label == worker.weight_version:
            return
        due = self._due(worker)
        proven = due is not None and due.proven_by(label) and worker.url not in self._book.reasons
        epoch = due.epoch if due is not None and proven else 0
        self._fleet.set_version(worker, label, epoch)

    def _here(self, worker: Worker) -> bool:
        known = self._fleet.find(worker.url) is worker
        return known and worker.health.state is Health.HEALTHY

    def _due(self, worker: Worker) -> TargetVersion | None:
        return self._book.published.due_of(worker.url, worker.model)

    async def _ask(self, worker: Worker, asking: object, came_up: bool) -> None:
        try:
            while self._here(worker) and self._newest.get(worker) is asking:
                async with self._places:
                    await self._pace.wait_turn()
                    version = worker.version
                    label = (await labels_of([worker], {}))[worker]
                if self._busy(worker) or worker.version is not version:
                    return
                self.learn(worker, label)
                due = self._due(worker)
                if due is None or due.label is None or label is not None:
                    doubted = worker.url in self._book.reasons
                    if due is not None and (came_up or doubted or version.label is None):
                        await self._judge(worker, due, label)
                    return
                self._let_go(worker)  # it can't tell: nothing is claimed of it
                await trio.sleep(AGAIN_SECS)
        finally:
            if self._newest.get(worker) is asking:
                del self._newest[worker]
                self._let_go(worker)

    def _let_go(self, worker: Worker) -> None:
        if UNPROVEN in worker.cordon_reasons:
            self._fleet.uncordon(worker, UNPROVEN)

    async def _judge(self, worker: Worker, due: TargetVersion, label: str | None) -> None:
        """Hold it back where it has not what the last update gave to the others."""
        if worker.url in self._book.reasons:
            await self._clear_if_proven(worker, due, label)
            return
        reason = ""
        if due.missed_with(label):
            reason = f"missed the update to {due.label!r}: it came up with {label!r}"
        elif due.open_with(label) and self._may_hash():
            verdict = await compare_checksums([worker], {}, CHECKSUM_SECS)
            if self._busy(worker) or self._due(worker) is not due:
                return
            if verdict.whole and verdict.whole != due.digest:
                reason = f"missed the update of epoch {due.epoch}: it came up with other tensors"
            elif verdict.whole:
                self._fleet.set_version(worker, label, due.epoch)
        if reason:
            self._book.mark({worker.url: reason})
            await self._book.keep()

    async def _clear_if_proven(self, worker: Worker, due: TargetVersion, label: str | None) -> None:
        """It was in doubt for what it might have, and has what was published all the same."""
        if not due.digest or label != due.label or not self._may_hash():
            return
        verdict = await compare_checksums([worker], {}, CHECKSUM_SECS)
        if self._busy(worker) or self._due(worker) is not due or verdict.whole != due.digest:
            return
        if NOT_FLUSHED in self._book.reasons.get(worker.url, "") and not await forgets(worker):
            return
        await go_on([worker], self._book.stopped, {})
        if self._busy(worker) or self._due(worker) is not due:
            return
        _log.info("Worker %s has the published weights: it is no more in doubt", worker.url)
        self._fleet.set_version(worker, label, due.epoch)
        self._book.clear([worker.url])
        await self._book.keep()
