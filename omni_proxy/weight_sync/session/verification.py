"""What workers hold after a sync, by what they say themselves, and whether it is one and the same.

Invariant: nobody is agreed with whose checker should have answered and did not. A worker without a
checker, or one whose digests nobody else's can be compared with, is taken at its word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.prober import INSTANCE_KEYS
from omni_proxy.upstream_http.client import Call, broadcast
from omni_proxy.weight_sync.checksum import roll_up
from omni_proxy.weight_sync.operations.worker_calls import ask_checksums, labels_of
from omni_proxy.weight_sync.protocol.checksum_agreement import (
    OMNI,
    Digest,
    Verdict,
    compare,
    verdict_on,
)
from omni_proxy.weight_sync.store.manifest import StoredVersion

DIFFERS: Final = "its checksums differ from those of other workers"


@dataclass(frozen=True, slots=True)
class Proof:
    """`wrong`: worker URL to reason. `held`: names of the tensors that each one's checker tells."""

    labels: Mapping[Worker, str | None] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def agreed(self) -> list[Worker]:
        return [worker for worker in self.labels if worker.url not in self.wrong]

    @property
    def label(self) -> str | None:
        told = {self.labels[worker] for worker in self.agreed}
        return told.pop() if len(told) == 1 else None


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """How workers are asked. `named`: what the version should be called, where somebody said so.

    `compares`: whether anything is compared. `known`: what some have proven a moment ago.
    """

    headers: Mapping[str, str]
    timeout_secs: float
    compares: bool = True
    named: str | None = None
    known: Mapping[Worker, CachedProof] = field(default_factory=dict)


async def prove(workers: Sequence[Worker], question: ProofRequest) -> Proof:
    headers = question.headers
    labels = await labels_of(workers, headers)
    if not question.compares:
        return Proof(labels)
    misnamed = _misnamed(labels, question.named)
    if (known := await _still_known(labels, question)) is not None:
        return replace(known, wrong={**misnamed, **known.wrong})
    answers = await ask_checksums(workers, headers, question.timeout_secs)
    verdict = compare({answer.worker: answer for answer in answers})
    wrong = misnamed | dict.fromkeys(verdict.mismatched, DIFFERS)
    for answer in answers:
        if not answer.success and not answer.refused:
            wrong[answer.worker] = f"its checksums could not be read: {answer.why}"
    held = {answer.worker: frozenset(_names(answer)) for answer in answers}
    return Proof(labels, verdict, wrong, held)


def healed(
    proof: Proof, names: frozenset[str], spoiled: Mapping[str, frozenset[str]], sure: set[str]
) -> list[str]:
    """URLs of those that are right again, whatever was wrong with them before.

    Either the sync had every tensor that they hold, or every one of the sync that failed; or their
    digest is that of somebody who was right before (`sure`).
    """
    found = []
    agreed = [worker.url for worker in proof.agreed]
    proven = any(url in sure and url in proof.verdict.checked for url in agreed)
    for url in agreed:
        held = proof.held.get(url, frozenset())
        whole = not held or held <= names
        mended = url in spoiled and spoiled[url] <= names
        if whole or mended or (proven and url in proof.verdict.checked):
            found.append(url)
    return found


async def _still_known(labels: Mapping[Worker, str | None], question: ProofRequest) -> Proof | None:
    """None where one of them has to be asked: then all are, to be compared by the same facts."""
    known = {worker: question.known[worker] for worker in labels if worker in question.known}
    if not labels or len(known) < len(labels):
        return None
    now = await instances_of(list(labels), question.headers)
    if not all(each.counts(now[worker], labels[worker]) for worker, each in known.items()):
        return None
    verdict = verdict_on({worker.url: each.digest for worker, each in known.items()})
    wrong = dict.fromkeys(verdict.mismatched, DIFFERS)
    return Proof(labels, verdict, wrong, {w.url: each.names for w, each in known.items()})


def _misnamed(labels: Mapping[Worker, str | None], named: str | None) -> dict[str, str]:
    """Who calls its weights otherwise than they were called to all, though others do not.

    An engine that takes no label of a sync keeps the one of before: it tells nothing then, as long
    as nobody shows that it could.
    """
    if named is None or named not in labels.values():
        return {}
    return {
        worker.url: f"it calls its weights {label!r}, and others theirs {named!r}"
        for worker, label in labels.items()
        if label not in (None, named)
    }


def _names(answer: WorkerResult) -> Iterator[str]:
    """Of every tensor, whatever the place of the table in the answer."""
    waiting: list[object] = [answer.body if answer.success else None]
    while waiting:
        place = waiting.pop()
        if isinstance(place, list):
            waiting += place
        elif isinstance(place, dict):
            sums = place.get("checksums")
            if isinstance(sums, dict):
                yield from sums
            waiting += [place.get(name) for name in ("results", "data", "rank_results", "ranks")]


# What a delivery has proven of a worker already, so that its tensors need not be hashed once more.
#
# Invariant: it stands for a new proof only where it is as good: the worker's digest was that over all
# tensors of the version, and over nothing else; the process that told it answers still, and calls its
# weights by that version's name.

ASK_SECS: Final = 5.0


@dataclass(frozen=True, slots=True)
class CachedProof:
    """`instance`: which process of the worker had just these tensors, of which they are all."""

    instance: str
    label: str
    checksum: str
    names: frozenset[str]

    @property
    def digest(self) -> Digest:
        return Digest(OMNI, (), self.checksum)

    def counts(self, instance: str, label: str | None) -> bool:
        """Whether a new proof could tell nothing else, by what the worker says of itself now."""
        return instance == self.instance and label == self.label


def known_by(answer: WorkerResult, version: StoredVersion, instance: str) -> CachedProof | None:
    """`answer`: to the delivery of the version, with the proof after it; None where that is less.

    A worker of several stages may hold more than the one proof has seen.
    """
    body = answer.body
    if not answer.success or not isinstance(body, dict) or not instance or not version.label:
        return None
    checksum, rows = body.get("checksum"), body.get("results")
    stages = [row for row in rows if _has_weights(row)] if isinstance(rows, list) else []
    if len(stages) != 1 or not version.digests or checksum != roll_up(version.digests):
        return None
    return CachedProof(instance, version.label, str(checksum), frozenset(version.digests))


async def instances_of(workers: Sequence[Worker], headers: Mapping[str, str]) -> dict[Worker, str]:
    """Which process answers for each; "" where it does not tell."""
    call = Call("GET", "/server_info", headers=headers, timeout_secs=ASK_SECS)
    found = await broadcast(workers, call)
    return {each.worker: _instance_in(each.json()) if each.ok else "" for each in found}


def _instance_in(info: object) -> str:
    told = [info.get(key) for key in INSTANCE_KEYS] if isinstance(info, dict) else []
    return next(
        (str(value) for value in told if isinstance(value, str | int | float) and value), ""
    )


def _has_weights(row: object) -> bool:
    data = row.get("data") if isinstance(row, dict) else None
    return isinstance(data, dict) and not (data.get("skipped") or data.get("unsupported"))
