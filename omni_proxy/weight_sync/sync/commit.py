"""Commit: the end of a round, which delivers, proves and publishes the applied weights.

    received by the proxy? ─> sealed, delivered to other workers ─> all proven ─> published
                                 not all have it: forward (deliver again), rollback (deliver
                                 the previous version to all), quarantine (leave out) ─┘
Invariants: a version is delivered only when it is complete in the store, and published only for
workers that applied all of it and agree. No worker returns to rotation before the uncertain ones
are recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.worker_drain import drain_cordoned
from omni_proxy.weight_sync.delivery.deliver import DeliveryOptions
from omni_proxy.weight_sync.delivery.proxy_rank import NAME
from omni_proxy.weight_sync.delivery.service import VersionService
from omni_proxy.weight_sync.protocol.published_version import TargetVersion
from omni_proxy.weight_sync.protocol.requests import UpdateFlags
from omni_proxy.weight_sync.protocol.trainer_group import SyncState, WeightSync
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.version_store import UnknownVersion
from omni_proxy.weight_sync.sync.lifecycle import SyncLifecycle
from omni_proxy.weight_sync.sync.verification import (
    MISMATCH,
    CachedProof,
    Proof,
    ProofRequest,
    cached_proof,
    prove_workers,
    read_instances,
    recovered_workers,
)
from omni_proxy.weight_sync.worker_calls import (
    RECOVERY_SECS,
    continue_generation,
    limit_secs,
    verify_checksums,
)

REFUSED_STATUS = 400
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """`took`: workers that applied the version; `failed`: URLs of the other workers to reasons."""

    took: tuple[Worker, ...]
    failed: Mapping[str, str]


class RoundDelivery:
    """Stores the version that a round received, and delivers it to workers.

    `version`: the current round's version. `results`: results of its deliveries, by worker URL.
    `proofs`: proofs from these deliveries, by worker.
    """

    def __init__(self, lifecycle: SyncLifecycle, version_service: VersionService) -> None:
        self._lifecycle = lifecycle
        self._version_service = version_service
        self.version: StoredVersion | None = None
        self.results: dict[str, WorkerResult] = {}
        self.proofs: dict[Worker, CachedProof] = {}
        self.error = ""  # the reason if data was received but no version could be stored
        self._late: list[Worker] = []

    def recipients(self) -> list[Worker]:
        """All healthy workers if only the proxy's rank was in the group, otherwise none.

        Workers that are not healthy now catch up later.
        """
        if NAME not in self._lifecycle.sync.participant_states or self._lifecycle.workers:
            return []
        workers = self._lifecycle.fleet.workers
        return [worker for worker in workers if worker.health.state is Health.HEALTHY]

    def cordon_late_workers(self) -> None:
        """Cordon workers that became healthy in the round, before others return to rotation."""
        if self.version is not None:
            lifecycle = self._lifecycle
            participants = (*lifecycle.workers, *lifecycle.recipients)
            targets = {*self.results, *(worker.url for worker in participants)}
            self._late = [w for w in lifecycle.fleet.workers if w.url not in targets]
            for worker in self._late:
                self._version_service.catch_up.cordon(worker)

    def begin(self) -> None:
        """Reset the state, since a new round is being closed."""
        self.version, self.results, self.proofs, self.error = None, {}, {}, ""

    @property
    def received(self) -> bool:
        """Whether the proxy's rank was a participant and received everything."""
        participant = self._lifecycle.sync.participant_states.get(NAME)
        return participant is not None and not participant.failed

    @property
    def previous(self) -> StoredVersion | None:
        """The version of all workers before this round; None if it is not in the store."""
        current = self._version_service.store_service.current
        epoch = self._lifecycle.journal.published.epoch
        return current if current is not None and current.epoch == epoch else None

    async def seal(self, label: str | None) -> None:
        """Store the received version, also if no worker needs it now: later ones catch up with it.

        An error is logged and kept in `error`.
        """
        try:
            self.version = await self._version_service.proxy_rank.seal(label)
        except (OSError, LookupError) as error:
            self.error = f"the received version could not be stored: {error}"
            _log.error("version_seal_failed error=%s", str(error))

    async def deliver(
        self, version: StoredVersion, workers: Sequence[Worker], headers: Mapping[str, str]
    ) -> DeliveryResult:
        """Deliver `version` to each of the workers that is not dead."""
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
        failed |= {result.worker: result.reason for result in results if not result.success}
        return DeliveryResult(tuple(worker for worker in alive if worker.url not in failed), failed)

    def refuse(self, workers: Sequence[Worker], reason: str) -> DeliveryResult:
        """Record that no worker gets the version, so all keep their weights."""
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
        """Discard what was received in a round that will not be closed."""
        await self._version_service.proxy_rank.discard()

    async def discard(self) -> None:
        """Discard the version, which no worker has."""
        version, self.version = self.version, None
        store = self._version_service.store_service.store
        if version is not None and store is not None:
            await self._version_service.store_service.run_in_thread(store.discard, version)


JsonObject = dict[str, object]
MIN_AGREEING: Final = 2


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Workers whose checksums at `epoch` could not be read because their engines were paused."""

    epoch: int
    urls: frozenset[str]


class RoundCommit:
    """Closes or abandons rounds.

    `flushed`: a call of the round flushed the engines' caches. `cause`: why the last round failed
    although all participants applied it, or "".
    """

    def __init__(self, lifecycle: SyncLifecycle, delivery: RoundDelivery) -> None:
        self._lifecycle = lifecycle
        self._delivery = delivery
        self._labels: set[str] = set()  # labels in the calls of the round
        self.flushed = False
        self.cause = ""
        self._recovered_all = False
        self._deferred = _Deferred(0, frozenset())

    def on_call(self, flags: UpdateFlags, *, flushes: bool) -> None:
        self.flushed = self.flushed or flushes
        if flags.weight_version is not None:
            self._labels.add(flags.weight_version)

    async def quiesce(self, workers: Sequence[Worker], operation: str) -> None:
        """Cordon the workers, wait for their requests in flight, and clear their versions."""
        config = self._lifecycle.config_store.config.weight_sync
        if config.while_updating != "pass":
            self._lifecycle.changing_versions.cordon(workers)
            await self._lifecycle.fleet.await_held()
        paused = self._lifecycle.journal.paused_engines
        running = [worker for worker in workers if worker.url not in paused]
        await drain_cordoned(running, config.drain_secs, operation)
        self._lifecycle.changing_versions.clear_versions(workers)

    async def close(self, headers: Mapping[str, str]) -> JsonObject:
        """Prove and publish what the round applied; return keys for the response.

        Enters the state VERIFYING if the sync isn't in it yet.
        """
        lifecycle, sync = self._lifecycle, self._lifecycle.sync
        if sync.state is not SyncState.VERIFYING:
            sync.close()
        names = frozenset(sync.round.names)
        started_at = trio.current_time()
        proof, mismatched = await self._deliver_and_prove(headers)
        more: JsonObject = {}
        version = self._delivery.version
        if mismatched:
            proof, mismatched, version = await self._recover(proof, mismatched, headers)
            if version is not self._delivery.version and version is not None:
                names = frozenset(version.manifest.tensors)
                more["rolled_back_to"] = version.label or version.number
        more["verification"] = proof.verdict.to_dict()
        lifecycle.meters.note("verify", trio.current_time() - started_at, ok=not mismatched)
        if proof.agreed:
            more |= await self._publish(proof, version)
        if version is not self._delivery.version or not proof.agreed:
            await self._delivery.discard()
        uncertain = await self._settle_workers(proof, mismatched, names, headers)
        if uncertain:
            more["uncertain"] = uncertain
        return more

    async def _settle_workers(
        self,
        proof: Proof,
        mismatched: Mapping[str, str],
        names: frozenset[str],
        headers: Mapping[str, str],
    ) -> dict[str, str]:
        """Record the uncertain workers, uncordon the others. Returns uncertain URLs to reasons."""
        lifecycle, journal = self._lifecycle, self._lifecycle.journal
        is_unchanged = {w.url for w in lifecycle.fleet.workers if w.url not in journal.uncertain}
        matching = recovered_workers(proof, names, lifecycle.uncertain_tensors, is_unchanged)
        if lifecycle.sync.round.whole:
            matching = [worker.url for worker in proof.agreed]
        agreed = {*(worker.url for worker in proof.agreed), NAME}
        left_out = lifecycle.sync.publish(agreed)
        uncertain = {url: reason for url, reason in left_out.items() if url not in agreed} | dict(
            mismatched
        )
        await self._flush_own_pauses(proof.agreed, headers)
        self._clear_cache_knowledge(proof.agreed)
        lifecycle.mark_uncertain(uncertain, names)
        recovered = [url for url in matching if url in journal.uncertain and url not in uncertain]
        workers = [w for url in recovered if (w := lifecycle.fleet.find(url)) is not None]
        await continue_generation(workers, journal.paused_engines, headers)
        journal.clear_uncertain(recovered)
        for url in matching:
            lifecycle.uncertain_tensors.pop(url, None)
        await lifecycle.record_after_step()
        await lifecycle.own_pauses.end(lifecycle.workers, headers)
        lifecycle.changing_versions.release(uncertain)
        self._labels, self.flushed = set(), False
        return uncertain

    async def verify_deferred(
        self, resumed: Sequence[Worker], headers: Mapping[str, str]
    ) -> JsonObject:
        """Compare checksums that could not be read while the engines were paused.

        Returns keys for the response; {} if no comparison was deferred.
        """
        lifecycle, deferred = self._lifecycle, self._deferred
        resumed_workers = [
            w for w in resumed if w.url in deferred.urls and w.weight_epoch == deferred.epoch
        ]
        if not resumed_workers or lifecycle.config_store.config.weight_sync.verify != "checksum":
            return {}
        self._deferred = _Deferred(
            deferred.epoch, deferred.urls - {worker.url for worker in resumed_workers}
        )
        verdict = await verify_checksums(resumed_workers, headers, RECOVERY_SECS)
        if verdict.mismatched:
            lifecycle.mark_uncertain(dict.fromkeys(verdict.mismatched, MISMATCH), ())
            await lifecycle.journal.save()
        elif verdict.whole:
            await lifecycle.journal.add_digest(deferred.epoch, verdict.whole)
        return {"verification": verdict.to_dict()}

    async def _flush_own_pauses(
        self, workers: Sequence[Worker], headers: Mapping[str, str]
    ) -> None:
        """Flush the caches of engines that the proxy paused: they are of the old weights.

        A trainer that pauses engines itself also decides whether to flush them.
        """
        for worker in await self._lifecycle.own_pauses.flush(workers, headers):
            self._lifecycle.fleet.cache_cleared(worker)

    async def abandon(self) -> dict[str, str]:
        """Drop a round that the trainer left open. Returns uncertain worker URLs to reasons."""
        lifecycle = self._lifecycle
        names = set(lifecycle.sync.round.names)
        uncertain = lifecycle.sync.abandon()
        await self._delivery.discard_received()
        lifecycle.mark_uncertain(uncertain, names)
        await lifecycle.record_after_step()
        lifecycle.changing_versions.release(uncertain)
        self._labels, self.flushed = set(), False
        return uncertain

    def failure(self, participant_failure: str) -> str:
        """Why the round just closed failed, or "".

        `participant_failure`: why a participant's call failed.
        """
        return "" if self._recovered_all else participant_failure or self.cause

    def with_delivery_results(self, results: Sequence[WorkerResult]) -> list[WorkerResult]:
        """The results, each replaced by the result of a delivery to the same worker if any."""
        delivered = dict(self._delivery.results)
        merged = [delivered.pop(result.worker, result) for result in results]
        return [*merged, *delivered.values()]

    async def _deliver_and_prove(self, headers: Mapping[str, str]) -> tuple[Proof, dict[str, str]]:
        """Returns the proof of workers that applied the version, and URLs of others to reasons."""
        lifecycle, delivery = self._lifecycle, self._delivery
        participants = lifecycle.sync.participant_states
        delivery.begin()
        self.cause, self._recovered_all = "", False
        receivers = [worker for worker in lifecycle.workers if not participants[worker.url].failed]
        failed = {
            w.url: participants[w.url].failed for w in lifecycle.workers if w not in receivers
        }
        lifecycle.recipients = delivery.recipients()
        if delivery.received:
            await delivery.seal(self._label)
            self.cause = delivery.error if lifecycle.recipients else ""
        if lifecycle.recipients and delivery.version is not None:
            result = await self._deliver(delivery.version, headers)
            receivers += result.took
            # If the delivery changed no worker, none of them is uncertain.
            if result.took or not all(r.unchanged for r in delivery.results.values()):
                failed |= result.failed
            self.cause = _first(result.failed)
        proof = await self._prove(receivers, headers, self._label)
        if not lifecycle.sync.all_ok:
            proof = _reject_lone_proof(proof, lifecycle.sync)
        return proof, failed | dict(proof.wrong)

    async def _deliver(self, version: StoredVersion, headers: Mapping[str, str]) -> DeliveryResult:
        """Deliver to all recipients, or to none if the journal cannot be written."""
        lifecycle = self._lifecycle
        await self.quiesce(lifecycle.recipients, "the delivery of a version")
        try:
            await lifecycle.record("weights update")
        except OSError as error:
            lifecycle.journal.record_error(error)
            reason = f"nothing was sent: the journal {lifecycle.journal.path} can't be written"
            return self._delivery.refuse(lifecycle.recipients, reason)
        return await self._delivery.deliver(version, lifecycle.recipients, headers)

    async def _recover(
        self, proof: Proof, mismatched: dict[str, str], headers: Mapping[str, str]
    ) -> tuple[Proof, dict[str, str], StoredVersion | None]:
        """Apply [weight_sync] on_failure. The last result is the version to publish."""
        lifecycle, delivery = self._lifecycle, self._delivery
        policy, version = lifecycle.config_store.config.weight_sync.on_failure, delivery.version
        if policy == "forward" and version is not None:
            retried = [w for url in mismatched if (w := lifecycle.fleet.find(url)) is not None]
            result = await delivery.deliver(version, retried, headers)
            proof = await self._prove([*proof.agreed, *result.took], headers, self._label)
            mismatched = dict(result.failed) | dict(proof.wrong)
            self._recovered_all = not mismatched
            self.cause = _first(mismatched)
        elif policy == "rollback" and (previous := delivery.previous) is not None:
            self.cause = f"{_first(mismatched)}; {previous.name} was delivered to all workers again"
            targets = [*lifecycle.workers, *lifecycle.recipients]
            result = await delivery.deliver(previous, targets, headers)
            proof = await self._prove(result.took, headers, previous.label)
            return proof, dict(result.failed) | dict(proof.wrong), previous
        return proof, mismatched, version

    async def _prove(
        self, workers: Sequence[Worker], headers: Mapping[str, str], label: str | None
    ) -> Proof:
        config = self._lifecycle.config_store.config
        request = ProofRequest(
            headers,
            timeout_secs=limit_secs(config.admin.worker_timeout_secs),
            compares=config.weight_sync.verify == "checksum",
            label=label,
            cached=self._delivery.proofs,
        )
        return await prove_workers(workers, request)

    @property
    def _label(self) -> str | None:
        """The trainer's label for the version: of the last call, or the only one of the round."""
        last = self._lifecycle.sync.round.last.weight_version
        only = next(iter(self._labels)) if len(self._labels) == 1 else None
        return last if last is not None else only

    async def _publish(self, proof: Proof, version: StoredVersion | None) -> JsonObject:
        lifecycle, label = self._lifecycle, proof.label
        before = lifecycle.changing_versions.previous_labels
        comparable = all(before) or label in self._labels
        target = TargetVersion(
            label=label,
            is_new_label=label is not None and comparable and label not in before,
            digest=proof.verdict.whole if not proof.wrong else "",
            models=tuple({worker.model for worker in proof.agreed}),
        )
        self._delivery.cordon_late_workers()
        published = await lifecycle.journal.publish(target, lifecycle.chosen)
        self._deferred = _Deferred(published.epoch, proof.paused)
        if version is not None:
            await self._delivery.published(version, label, published.epoch)
        for worker in proof.agreed:
            lifecycle.changing_versions.set_proven(worker, proof.labels[worker], published.epoch)
        return {
            "weight_epoch": published.epoch,
            "weight_version": label,
            "weight_versions": {w.url: proof.labels[w] for w in proof.agreed},
        }

    def _clear_cache_knowledge(self, workers: Sequence[Worker]) -> None:
        if self.flushed:
            for worker in workers:
                self._lifecycle.fleet.cache_cleared(worker)


def _reject_lone_proof(proof: Proof, sync: WeightSync) -> Proof:
    """If a participant refused the weights, reject a proof that no other worker confirms."""
    refused = any(participant.refused for participant in sync.participant_states.values())
    unconfirmed = len(proof.agreed) < MIN_AGREEING or len(proof.verdict.checked) < MIN_AGREEING
    if not refused or not unconfirmed:
        return proof
    reason = (
        f"it accepted what another worker refused, and no other worker agrees: {sync.first_failure}"
    )
    return replace(proof, wrong={**proof.wrong, **{w.url: reason for w in proof.agreed}})


def is_unchanged(result: WorkerResult, *, batched: bool) -> bool:
    """Whether a failed call left the weights unchanged; sure only in a batched round."""
    return batched and result.unchanged


def _first(failed: Mapping[str, str]) -> str:
    return next((f"{url}: {reason}" for url, reason in failed.items()), "")
