"""Whether a worker holds the tensors of a version, by what its checker says (api-server.md 3).

Pure. Invariant: nothing is proven where nothing could be compared. A tensor that a worker keeps in
another type than it was sent in has another digest, which says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.checksum import roll_up
from omni_proxy.weight_sync.store.manifest import StoredVersion


@dataclass(frozen=True, slots=True)
class WorkerProof:
    """`differs`: what it holds is something else. Without either, `reason` says why not."""

    checked: int = 0  # tensors
    whole: str = ""  # the digest over all tensors that the worker tells
    differs: str = ""
    reason: str = ""

    @property
    def proven(self) -> bool:
        return self.checked > 0 and not self.differs

    def told(self) -> dict[str, object]:
        reason = {"unverified": self.reason} if self.reason else {}
        return {"checked_tensors": self.checked, "checksum": self.whole or None, **reason}


def proof_of(answer: WorkerResult, version: StoredVersion) -> WorkerProof:
    """`answer`: what the checker said to `checksum`."""
    if not answer.success:
        return WorkerProof(reason=f"its checker failed: {answer.why}")
    if not version.digests:
        return WorkerProof(reason=f"the digests of {version.name} are not known yet")
    for data in _stages(answer.body):
        sums, whole = data.get("checksums"), data.get("full_checksum")
        if isinstance(sums, dict) and sums:
            return _compared(data, sums, whole if isinstance(whole, str) else "", version)
    return WorkerProof(reason="its checker names no checksum that can be compared")


def _compared(
    data: Mapping[str, Any], sums: Mapping[str, Any], whole: str, version: StoredVersion
) -> WorkerProof:
    digests, retyped = version.digests, _retyped(data, version)
    known = [name for name in sums if name in digests and name not in retyped]
    if not known:
        return WorkerProof(whole=whole, reason="it keeps none of the tensors as they were sent")
    if len(known) == len(sums) and whole:
        expected = roll_up({name: digests[name] for name in known})
        differs = "" if whole == expected else f"its full_checksum is {whole}, not {expected}"
        return WorkerProof(len(known), whole, differs)
    if _size(data) > 1:
        return WorkerProof(
            whole=whole, reason="it tells no digest over whole tensors that can be compared"
        )
    wrong = [name for name in known if sums[name] != digests[name]]
    differs = f"tensor {wrong[0]!r} and {len(wrong) - 1} more differ" if wrong else ""
    return WorkerProof(len(known), whole, differs)


def _stages(body: object) -> Iterator[dict[str, Any]]:
    rows = body.get("results") if isinstance(body, dict) else None
    for row in rows if isinstance(rows, list) else ():
        data = row.get("data") if isinstance(row, dict) else None
        if isinstance(data, dict):
            yield data


def _retyped(data: Mapping[str, Any], version: StoredVersion) -> set[str]:
    """Tensors that it keeps in another type than they came in."""
    rows = data.get("tensor_metadata")
    if not isinstance(rows, dict):
        return set()
    types = {
        name: str(row.get("dtype")).removeprefix("torch.")
        for name, row in rows.items()
        if isinstance(row, dict)
    }
    stored = version.record.tensors
    return {name for name, found in types.items() if name in stored and stored[name].dtype != found}


def _size(data: Mapping[str, Any]) -> int:
    layout = data.get("layout")
    size = layout.get("tp_size") if isinstance(layout, dict) else 1
    return size if isinstance(size, int) else 1
