"""What a delivery has proven of a worker already, so that its tensors need not be hashed once more.

Invariant: it stands for a new proof only where it is as good: the worker's digest was that over all
tensors of the version, and over nothing else; the process that told it answers still, and calls its
weights by that version's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from omni_proxy.control.agreement import OMNI, Digest
from omni_proxy.control.outcomes import WorkerAnswer
from omni_proxy.fleet.worker import Worker
from omni_proxy.watch.broadcast import broadcast
from omni_proxy.watch.calls import Call
from omni_proxy.watch.prober import INSTANCE_KEYS
from omni_proxy.weights.checksum import roll_up
from omni_proxy.weights.store.record import Version

ASK_SECS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Known:
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


def known_by(answer: WorkerAnswer, version: Version, instance: str) -> Known | None:
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
    return Known(instance, version.label, str(checksum), frozenset(version.digests))


async def instances_of(workers: Sequence[Worker], headers: Mapping[str, str]) -> dict[Worker, str]:
    """Which process answers for each; "" where it does not tell."""
    call = Call("GET", "/server_info", headers=headers, timeout_secs=ASK_SECS)
    found = await broadcast(workers, call)
    return {each.worker: _instance_in(each.parsed()) if each.ok else "" for each in found}


def _instance_in(info: object) -> str:
    told = [info.get(key) for key in INSTANCE_KEYS] if isinstance(info, dict) else []
    return next(
        (str(value) for value in told if isinstance(value, str | int | float) and value), ""
    )


def _has_weights(row: object) -> bool:
    data = row.get("data") if isinstance(row, dict) else None
    return isinstance(data, dict) and not (data.get("skipped") or data.get("unsupported"))
