"""The end of a round: what was applied everywhere is proven, published, and let back into routing.

    received by us? ─> sealed, given to who was no member ─> all of them proven ─> published
                                 not everybody has it: forward (given once more), rollback (the
                                 version of before given to all), quarantine (left out) ─┘
Invariant: a version is published only over workers that took all of it and agree; nobody is let
into routing again before it is written down who stays out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.worker_drain import wait_idle
from omni_proxy.weight_sync.delivery.proxy_rank import NAME
from omni_proxy.weight_sync.delivery.round import DeliveryResult, RoundDelivery
from omni_proxy.weight_sync.operations.resume import go_on
from omni_proxy.weight_sync.operations.worker_calls import limit_secs
from omni_proxy.weight_sync.protocol.published_version import TargetVersion
from omni_proxy.weight_sync.protocol.requests import Marks
from omni_proxy.weight_sync.protocol.session import SyncSession
from omni_proxy.weight_sync.protocol.states import SyncState
from omni_proxy.weight_sync.session.lifecycle import SessionLifecycle
from omni_proxy.weight_sync.session.verification import Proof, ProofRequest, healed, prove
from omni_proxy.weight_sync.store.manifest import StoredVersion

Told = dict[str, object]
ENOUGH: Final = 2


class RoundCommit:
    """`flushed`: some call of the round dropped what the engines had cached.

    `cause`: why the last round that was closed was no success, though all members applied it.
    """

    def __init__(self, life: SessionLifecycle, delivery: RoundDelivery) -> None:
        self._life = life
        self._delivery = delivery
        self._versions: set[str] = set()  # that the calls of the round named
        self.flushed = False
        self.cause = ""
        self._all_mended = False

    def heard(self, marks: Marks, *, flushes: bool) -> None:
        self.flushed = self.flushed or flushes
        if marks.weight_version is not None:
            self._versions.add(marks.weight_version)

    async def hold(self, workers: Sequence[Worker], what: str) -> None:
        """New requests wait, running ones get their time, and nobody tells a version any more."""
        sync = self._life.config_store.config.weight_sync
        if sync.while_updating != "pass":
            self._life.doubt.hold(workers)
            await self._life.fleet.await_replicated()
        stopped = self._life.book.stopped
        running = [worker for worker in workers if worker.url not in stopped]
        await wait_idle(running, sync.drain_secs, what)
        self._life.doubt.doubt(workers)

    async def close(self, headers: Mapping[str, str]) -> Told:
        """Prove and publish what the round applied. The session is in VERIFYING, or gets there."""
        life, session = self._life, self._life.session
        if session.state is not SyncState.VERIFYING:
            session.close()
        names = frozenset(session.round.names)
        began = trio.current_time()
        proof, wrong = await self._brought(headers)
        told: Told = {}
        version = self._delivery.version
        if wrong:
            proof, wrong, version = await self._mended(proof, wrong, headers)
            if version is not self._delivery.version and version is not None:
                names = frozenset(version.record.tensors)
                told["rolled_back_to"] = version.label or version.number
        told["verification"] = proof.verdict.told()
        life.meters.note("verify", trio.current_time() - began, ok=not wrong)
        if proof.agreed:
            told |= await self._publish(proof, version)
        if version is not self._delivery.version or not proof.agreed:
            await self._delivery.discard()
        sure = {worker.url for worker in life.fleet.workers if worker.url not in life.book.reasons}
        good = healed(proof, names, life.spoiled, sure)
        agreed = {worker.url for worker in proof.agreed}
        left = session.publish({*agreed, NAME})
        doubted = {url: why for url, why in left.items() if url not in {*agreed, NAME}} | wrong
        self._forget(proof.agreed)
        life.spoil(doubted, names)
        mended = [url for url in good if url in life.book.reasons and url not in doubted]
        found = [worker for url in mended if (worker := life.fleet.find(url)) is not None]
        await go_on(found, life.book.stopped, headers)
        life.book.clear(mended)
        for url in good:
            life.spoiled.pop(url, None)
        await life.record_what_was()
        life.doubt.let_go(doubted)
        self._versions, self.flushed = set(), False
        if doubted:
            told["uncertain"] = doubted
        return told

    async def give_up(self) -> dict[str, str]:
        """The round is left open by who should have ended it."""
        life = self._life
        names = set(life.session.round.names)
        doubted = life.session.abandon()
        await self._delivery.forget()
        life.spoil(doubted, names)
        await life.record_what_was()
        life.doubt.let_go(doubted)
        self._versions, self.flushed = set(), False
        return doubted

    def judged(self, failed: str) -> str:
        """Why the round that was just closed is no success; `failed`: why a member's call was."""
        return "" if self._all_mended else failed or self.cause

    def retold(self, answers: Sequence[WorkerResult]) -> list[WorkerResult]:
        """With what workers said to a delivery, in the place of what they had said before."""
        given = dict(self._delivery.answers)
        found = [given.pop(answer.worker, answer) for answer in answers]
        return [*found, *given.values()]

    async def _brought(self, headers: Mapping[str, str]) -> tuple[Proof, dict[str, str]]:
        """Who says what of the version, and who has not got it: by URL, with the reason."""
        life, parts, delivery = self._life, self._life.session.parts, self._delivery
        delivery.begin()
        self.cause, self._all_mended = "", False
        took = [worker for worker in life.workers if not parts[worker.url].failed]
        failed = {w.url: parts[w.url].failed for w in life.workers if w not in took}
        life.recipients = delivery.recipients()
        if delivery.received:
            await delivery.seal(self._label)
            self.cause = delivery.error if life.recipients else ""
        if life.recipients and delivery.version is not None:
            handed = await self._handed(delivery.version, headers)
            took += handed.took
            if handed.took or not all(each.unchanged for each in delivery.answers.values()):
                failed |= handed.failed  # else nobody has anything new
            self.cause = _first(handed.failed)
        proof = await self._prove(took, headers, self._label)
        if not life.session.whole:
            proof = _distrust(proof, life.session)
        return proof, failed | dict(proof.wrong)

    async def _handed(self, version: StoredVersion, headers: Mapping[str, str]) -> DeliveryResult:
        """To all that have to get it from us; to nobody where that can't be written down."""
        life = self._life
        await self.hold(life.recipients, "the delivery of a version")
        try:
            await life.record("weights update")
        except OSError as error:
            life.book.note(error)
            why = f"nothing was sent: the journal {life.book.where} can't be written"
            return self._delivery.refused(life.recipients, why)
        return await self._delivery.give(version, life.recipients, headers)

    async def _mended(
        self, proof: Proof, wrong: dict[str, str], headers: Mapping[str, str]
    ) -> tuple[Proof, dict[str, str], StoredVersion | None]:
        """What [weight_sync] on_failure makes of it: the version that is to be published, too."""
        life, delivery = self._life, self._delivery
        policy, version = life.config_store.config.weight_sync.on_failure, delivery.version
        if policy == "forward" and version is not None:
            again = [worker for url in wrong if (worker := life.fleet.find(url)) is not None]
            handed = await delivery.give(version, again, headers)
            proof = await self._prove([*proof.agreed, *handed.took], headers, self._label)
            wrong = dict(handed.failed) | dict(proof.wrong)
            self._all_mended = not wrong
            self.cause = _first(wrong)
        elif policy == "rollback" and (before := delivery.previous) is not None:
            self.cause = f"{_first(wrong)}; all workers were given {before.name} again"
            handed = await delivery.give(before, [*life.workers, *life.recipients], headers)
            proof = await self._prove(handed.took, headers, before.label)
            return proof, dict(handed.failed) | dict(proof.wrong), before
        return proof, wrong, version

    async def _prove(
        self, workers: Sequence[Worker], headers: Mapping[str, str], named: str | None
    ) -> Proof:
        config = self._life.config_store.config
        question = ProofRequest(
            headers,
            timeout_secs=limit_secs(config.admin.worker_timeout_secs),
            compares=config.weight_sync.verify == "checksum",
            named=named,
            known=self._delivery.known,
        )
        return await prove(workers, question)

    @property
    def _label(self) -> str | None:
        """What the trainer calls the version."""
        last = self._life.session.round.last.weight_version
        only = next(iter(self._versions)) if len(self._versions) == 1 else None
        return last if last is not None else only

    async def _publish(self, proof: Proof, version: StoredVersion | None) -> Told:
        life, label = self._life, proof.label
        before = life.doubt.labels_before
        known = all(before) or label in self._versions
        due = TargetVersion(
            label=label,
            named=label is not None and known and label not in before,
            digest=proof.verdict.whole if not proof.wrong else "",
            models=tuple({worker.model for worker in proof.agreed}),
        )
        self._delivery.hold_back()
        published = await life.book.publish(due, None)
        if version is not None:
            await self._delivery.published(version, label, published.epoch)
        for worker in proof.agreed:
            life.doubt.proven(worker, proof.labels[worker], published.epoch)
        return {
            "weight_epoch": published.epoch,
            "weight_version": label,
            "weight_versions": {w.url: proof.labels[w] for w in proof.agreed},
        }

    def _forget(self, workers: Sequence[Worker]) -> None:
        if self.flushed:
            for worker in workers:
                self._life.fleet.cache_cleared(worker)


def _distrust(proof: Proof, session: SyncSession) -> Proof:
    """Somebody refused what was sent to all: whoever took it needs another who agrees."""
    refused = any(part.refused for part in session.parts.values())
    alone = len(proof.agreed) < ENOUGH or len(proof.verdict.checked) < ENOUGH
    if not refused or not alone:
        return proof
    why = f"it took what another refused, and nobody agrees with it: {session.first_cause}"
    return replace(proof, wrong={**proof.wrong, **{w.url: why for w in proof.agreed}})


def certain(answer: WorkerResult, *, batched: bool) -> bool:
    """Whether a failed call left the weights of its member alone: a whole sync is refused whole."""
    return batched and answer.unchanged


def _first(failed: Mapping[str, str]) -> str:
    return next((f"{url}: {why}" for url, why in failed.items()), "")
