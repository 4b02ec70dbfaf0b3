"""Verification of the weights that workers have after a sync, by their labels and checksums.

Invariant: a worker whose checksums could not be read never counts as agreed. A worker without
checksums, or whose digests can't be compared with any other's, is trusted. A delivery's proof is
reused only if its digest covered exactly the tensors of the version, the same process still runs,
and it still reports the version's label.

`ChangingVersions` has the workers between the first call that may change their version and its
proof. Each leaves it with its proven version, its previous one if unchanged, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from omni_proxy.admin_ops.engine_dialects import SERVER_INFO
from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.cordon_reasons import UPDATING
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.prober import INSTANCE_KEYS
from omni_proxy.process_group.broadcast.tensor_hashing import roll_up
from omni_proxy.upstream_http.client import Call, broadcast
from omni_proxy.weight_sync.protocol.checksum_agreement import (
    OMNI,
    Digest,
    Verdict,
    compare_answers,
    compare_digests,
)
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.worker_calls import read_labels, request_checksums

MISMATCH: Final = "its checksums differ from those of other workers"
INSTANCE_TIMEOUT_SECS: Final = 5.0
PAUSED_STATUS: Final = 409  # vLLM's checksum route if the engine is paused (note:features 3.2)


@dataclass(frozen=True, slots=True)
class CachedProof:
    """A proof from a delivery: the process `instance` had exactly the tensors `names`."""

    instance: str
    label: str
    checksum: str
    names: frozenset[str]

    @property
    def digest(self) -> Digest:
        return Digest(OMNI, (), self.checksum)

    def is_valid(self, instance: str, label: str | None) -> bool:
        """Whether the worker still reports the same process and label."""
        return instance == self.instance and label == self.label


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """How workers are verified. `label`: the expected label of the version, None if unknown.

    `compares`: whether checksums are compared. `cached`: proofs from the preceding delivery.
    """

    headers: Mapping[str, str]
    timeout_secs: float
    compares: bool = True
    label: str | None = None
    cached: Mapping[Worker, CachedProof] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proof:
    """Labels and checksums of workers, compared.

    `wrong`: worker URL to reason. `tensors`: worker URL to the tensor names that it reports.
    `paused`: URLs of workers that report no checksums while their engine is paused.
    """

    labels: Mapping[Worker, str | None] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, frozenset[str]] = field(default_factory=dict)
    paused: frozenset[str] = frozenset()

    @property
    def agreed(self) -> list[Worker]:
        return [worker for worker in self.labels if worker.url not in self.wrong]

    @property
    def label(self) -> str | None:
        """The label that all agreed workers report; None if they differ."""
        labels = {self.labels[worker] for worker in self.agreed}
        return labels.pop() if len(labels) == 1 else None


async def prove_workers(workers: Sequence[Worker], request: ProofRequest) -> Proof:
    headers = request.headers
    labels = await read_labels(workers, headers)
    if not request.compares:
        return Proof(labels)
    misnamed = _misnamed(labels, request.label)
    if (cached := await _prove_from_cache(labels, request)) is not None:
        return replace(cached, wrong={**misnamed, **cached.wrong})
    results = await request_checksums(workers, headers, request.timeout_secs)
    verdict = compare_answers({result.worker: result for result in results})
    mismatched = misnamed | dict.fromkeys(verdict.mismatched, MISMATCH)
    for result in results:
        if not result.success and not result.refused:
            mismatched[result.worker] = f"its checksums could not be read: {result.reason}"
    tensors = {result.worker: frozenset(_tensor_names(result)) for result in results}
    paused = frozenset(result.worker for result in results if result.status == PAUSED_STATUS)
    return Proof(labels, verdict, mismatched, tensors, paused)


def recovered_workers(
    proof: Proof,
    names: frozenset[str],
    uncertain_tensors: Mapping[str, frozenset[str]],
    certain: set[str],
) -> list[str]:
    """URLs of workers that have the right weights now, even if they were uncertain before.

    One of these holds: the sync (`names`) had every tensor of the worker; it had every tensor of
    the sync that made the worker uncertain; the digest equals that of a `certain` worker.
    """
    recovered = []
    agreed = [worker.url for worker in proof.agreed]
    proven = any(url in certain and url in proof.verdict.checked for url in agreed)
    for url in agreed:
        tensors = proof.tensors.get(url, frozenset())
        complete = not tensors or tensors <= names
        repaired = url in uncertain_tensors and uncertain_tensors[url] <= names
        if complete or repaired or (proven and url in proof.verdict.checked):
            recovered.append(url)
    return recovered


async def _prove_from_cache(
    labels: Mapping[Worker, str | None], request: ProofRequest
) -> Proof | None:
    """None if a worker has no valid proof: then all are verified again, by the same method."""
    cached = {worker: request.cached[worker] for worker in labels if worker in request.cached}
    if not labels or len(cached) < len(labels):
        return None
    instances = await read_instances(list(labels), request.headers)
    if not all(p.is_valid(instances[worker], labels[worker]) for worker, p in cached.items()):
        return None
    verdict = compare_digests({worker.url: proof.digest for worker, proof in cached.items()})
    mismatched = dict.fromkeys(verdict.mismatched, MISMATCH)
    return Proof(labels, verdict, mismatched, {w.url: proof.names for w, proof in cached.items()})


def _misnamed(labels: Mapping[Worker, str | None], label: str | None) -> dict[str, str]:
    """Workers whose label differs from the sync's although another worker reports that label.

    If no worker reports it, the engines don't update their labels, and labels prove nothing.
    """
    if label is None or label not in labels.values():
        return {}
    return {
        worker.url: f"it reports the label {reported!r}, other workers report {label!r}"
        for worker, reported in labels.items()
        if reported not in (None, label)
    }


def _tensor_names(result: WorkerResult) -> Iterator[str]:
    """Names in all "checksums" tables of the response, at any depth."""
    pending: list[object] = [result.body if result.success else None]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            checksums = part.get("checksums")
            if isinstance(checksums, dict):
                yield from checksums
            pending += [part.get(name) for name in ("results", "data", "rank_results", "ranks")]


def cached_proof(result: WorkerResult, version: StoredVersion, instance: str) -> CachedProof | None:
    """The proof in a delivery's result; None if it does not prove all tensors.

    A worker with several stages may have more tensors than the proof covers.
    """
    body = result.body
    if not result.success or not isinstance(body, dict) or not instance or not version.label:
        return None
    checksum, rows = body.get("checksum"), body.get("results")
    stages = [row for row in rows if _has_weights(row)] if isinstance(rows, list) else []
    if len(stages) != 1 or not version.digests or checksum != roll_up(version.digests):
        return None
    return CachedProof(instance, version.label, str(checksum), frozenset(version.digests))


async def read_instances(
    workers: Sequence[Worker], headers: Mapping[str, str]
) -> dict[Worker, str]:
    """The process instance that each worker reports; "" if it reports none."""
    call = Call("GET", SERVER_INFO, headers=headers, timeout_secs=INSTANCE_TIMEOUT_SECS)
    results = await broadcast(workers, call)
    return {
        result.worker: _parse_instance(result.json()) if result.ok else "" for result in results
    }


def _parse_instance(info: object) -> str:
    values = [info.get(key) for key in INSTANCE_KEYS] if isinstance(info, dict) else []
    return next(
        (str(value) for value in values if isinstance(value, str | int | float) and value), ""
    )


def _has_weights(row: object) -> bool:
    data = row.get("data") if isinstance(row, dict) else None
    return isinstance(data, dict) and not (data.get("skipped") or data.get("unsupported"))


class ChangingVersions:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._cordoned: list[Worker] = []
        self._previous: dict[Worker, WeightVersion] = {}

    def __contains__(self, worker: object) -> bool:
        """Whether the worker's version was cleared and not set again."""
        return worker in self._previous

    @property
    def previous_labels(self) -> list[str | None]:
        return [version.label for version in self._previous.values()]

    def cordon(self, workers: Sequence[Worker]) -> None:
        """Keep new requests from the workers."""
        for worker in workers:
            if UPDATING not in worker.cordon_reasons:
                self._fleet.cordon(worker, UPDATING)
                self._cordoned.append(worker)

    def clear_versions(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker not in self._previous:
                self._previous[worker] = worker.weight_version
                self._fleet.set_version(worker, None, 0)

    def set_proven(self, worker: Worker, label: str | None, epoch: int) -> None:
        self._previous.pop(worker, None)
        self._fleet.set_version(worker, label, epoch)

    def release(self, changed: Iterable[str] = ()) -> None:
        """Release all workers. `changed`: URLs of workers that may have lost their previous
        weights."""
        changed = set(changed)
        for worker, version in self._previous.items():
            if worker.url not in changed and self._fleet.find(worker.url) is worker:
                self._fleet.set_version(worker, version.label, version.epoch)
        for worker in self._cordoned:
            if UPDATING in worker.cordon_reasons:
                self._fleet.uncordon(worker, UPDATING)
        self._previous.clear()
        self._cordoned.clear()
