"""Reads the weight version of each worker that becomes healthy or restarts.

A failed read is repeated with back-off. Invariant: a worker gets an epoch only if its label or
digest proves it; if its label is unknown, the old label is not assumed. A worker that becomes
healthy without the weights of the last update that targeted it is marked uncertain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from omni_proxy.admin_ops.results import NOT_FLUSHED
from omni_proxy.fleet.cordon_reasons import UNPROVEN
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.prober import StartThrottle
from omni_proxy.shared.backoff import Backoff
from omni_proxy.weight_sync.protocol.published_version import TargetVersion
from omni_proxy.weight_sync.state_journal import StateJournal
from omni_proxy.weight_sync.worker_calls import (
    continue_generation,
    flush_worker_cache,
    read_label,
    verify_checksums,
)

RETRY_SECS = 5.0  # for an engine that reports no label although an update set one
FIRST_PAUSE_SECS: Final = 1.0  # after the first failed read; doubles with each further one
MAX_PAUSE_SECS: Final = 30.0
CHECKSUM_SECS = 300.0
MAX_CONCURRENT: Final = 64  # concurrent probes when a whole fleet starts
TURNS_EACH: Final = 4  # event loop turns per probe: health probes are more urgent than labels
_log = logging.getLogger(__name__)


class VersionProbe:
    """Probes the versions of workers, each in its own task.

    `busy(worker)`: whether an operation that reads the label at its end runs on the worker.
    `may_hash()`: whether a worker may be blocked while it computes checksums.
    `strict()`: whether a worker that becomes healthy is cordoned until its version was read.
    """

    def __init__(
        self,
        fleet: Fleet,
        journal: StateJournal,
        busy: Callable[[Worker], bool],
        may_hash: Callable[[], bool],
        strict: Callable[[], bool] = lambda: False,
    ) -> None:
        self._fleet = fleet
        self._journal = journal
        self._busy = busy
        self._may_hash = may_hash
        self._strict = strict
        self._latest: dict[Worker, object] = {}  # token of the latest probe; older ones stop
        self._slots = trio.CapacityLimiter(MAX_CONCURRENT)
        self._throttle = StartThrottle(TURNS_EACH)
        self.nursery: trio.Nursery | None = None
        fleet.watch_health(lambda worker, _: self.probe_soon(worker, returned=True))
        fleet.watch_cache_cleared(self.probe_soon)

    def start(self, nursery: trio.Nursery) -> None:
        """Probe workers that became healthy before this start and are cordoned since then."""
        self.nursery = nursery
        for worker in self._fleet.workers:
            if self._busy(worker):
                self._uncordon(worker)
            elif self._may_have_missed(worker):
                self.probe_soon(worker, returned=True)

    def probe_soon(self, worker: Worker, *, returned: bool = False) -> None:
        """Probe a healthy worker. `returned`: it became healthy or restarted.

        A worker without a known label counts as returned too, because a restart clears the label.
        """
        if not self._fleet.has_healthy(worker) or self._busy(worker):
            return
        self.cordon(worker)
        if self.nursery is not None:
            self._latest[worker] = token = object()
            self.nursery.start_soon(self._probe, worker, token, returned)

    def cordon(self, worker: Worker) -> None:
        """Cordon the worker until its version was read, if `strict` requires that."""
        cordoned = UNPROVEN in worker.cordon_reasons or worker.url in self._journal.uncertain
        if (
            self._fleet.has_healthy(worker)
            and self._strict()
            and self._may_have_missed(worker)
            and not cordoned
        ):
            self._fleet.cordon(worker, UNPROVEN)

    def _may_have_missed(self, worker: Worker) -> bool:
        """Whether an update targeted the worker and its weights are not proven."""
        target = self._target(worker)
        return target is not None and not target.waived and worker.weight_epoch != target.epoch

    def record_label(self, worker: Worker, label: str | None) -> None:
        """Set the worker's version from a reported label, unless an operation runs on it."""
        if self._busy(worker) or label == worker.weight_label:
            return
        target = self._target(worker)
        certain = worker.url not in self._journal.uncertain
        proven = target is not None and target.is_proven_by(label) and certain
        epoch = target.epoch if target is not None and proven else 0
        self._fleet.set_version(worker, label, epoch)

    def _target(self, worker: Worker) -> TargetVersion | None:
        return self._journal.published.target_for(worker.url, worker.model)

    async def _probe(self, worker: Worker, token: object, returned: bool) -> None:
        backoff = Backoff(FIRST_PAUSE_SECS, MAX_PAUSE_SECS)
        try:
            while self._fleet.has_healthy(worker) and self._latest.get(worker) is token:
                async with self._slots:
                    await self._throttle.wait_turn()
                    version = worker.weight_version
                    label, was_asked = await read_label(worker)
                if self._busy(worker) or worker.weight_version is not version:
                    return
                self.record_label(worker, label)
                target = self._target(worker)
                is_expected = target is not None and target.label is not None
                if was_asked and (label is not None or not is_expected):
                    uncertain = worker.url in self._journal.uncertain
                    if target is not None and (returned or uncertain or version.label is None):
                        await self._check(worker, target, label)
                    return
                self._uncordon(worker)  # without a label its version stays unknown
                await trio.sleep(RETRY_SECS if was_asked else backoff.next_delay())
        finally:
            if self._latest.get(worker) is token:
                del self._latest[worker]
                self._uncordon(worker)

    def _uncordon(self, worker: Worker) -> None:
        if UNPROVEN in worker.cordon_reasons:
            self._fleet.uncordon(worker, UNPROVEN)

    async def _check(self, worker: Worker, target: TargetVersion, label: str | None) -> None:
        """Mark the worker uncertain if it does not have the weights of the last update."""
        if worker.url in self._journal.uncertain:
            await self._clear_if_proven(worker, target, label)
            return
        reason = ""
        if target.is_missed_by(label):
            reason = f"missed the update to {target.label!r}: it returned with {label!r}"
        elif target.needs_digest(label) and self._may_hash():
            verdict = await verify_checksums([worker], {}, CHECKSUM_SECS)
            if self._busy(worker) or self._target(worker) is not target:
                return
            if verdict.whole and verdict.whole != target.digest:
                reason = (
                    f"missed the update of epoch {target.epoch}: it returned with other tensors"
                )
            elif verdict.whole:
                self._fleet.set_version(worker, label, target.epoch)
        if reason:
            self._journal.mark_uncertain({worker.url: reason})
            await self._journal.save()

    async def _clear_if_proven(
        self, worker: Worker, target: TargetVersion, label: str | None
    ) -> None:
        """Return an uncertain worker to rotation if its digest is that of the published weights."""
        if not target.digest or label != target.label or not self._may_hash():
            return
        verdict = await verify_checksums([worker], {}, CHECKSUM_SECS)
        changed = self._busy(worker) or self._target(worker) is not target
        if changed or verdict.whole != target.digest:
            return
        reason = self._journal.uncertain.get(worker.url, "")
        if NOT_FLUSHED in reason and not await flush_worker_cache(worker):
            return
        await continue_generation([worker], self._journal.paused_engines, {})
        if self._busy(worker) or self._target(worker) is not target:
            return
        _log.info("worker_recovered worker=%s epoch=%d", worker.url, target.epoch)
        self._fleet.set_version(worker, label, target.epoch)
        self._journal.clear_uncertain([worker.url])
        await self._journal.save()
