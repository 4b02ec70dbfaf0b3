"""Compares a worker's checksums (api-server.md 3) with the digests of a stored version.

Pure. Invariant: without a comparison nothing is proven. A tensor that a worker keeps in another
dtype than it was sent in has another digest, which proves nothing either way.
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
    """`differs`: how the worker's tensors differ. If nothing could be compared: `reason`."""

    checked: int = 0  # tensors
    whole: str = ""  # the worker's digest over all tensors
    differs: str = ""
    reason: str = ""

    @property
    def proven(self) -> bool:
        return self.checked > 0 and not self.differs

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        reason = {"unverified": self.reason} if self.reason else {}
        return {"checked_tensors": self.checked, "checksum": self.whole or None, **reason}


def compare_checksums(result: WorkerResult, version: StoredVersion) -> WorkerProof:
    """`answer`: the weights checker's answer to `checksum`."""
    if not result.success:
        return WorkerProof(reason=f"its checker failed: {result.reason}")
    if not version.digests:
        return WorkerProof(reason=f"the digests of {version.name} are not known yet")
    for data in _stage_results(result.body):
        sums, digest = data.get("checksums"), data.get("full_checksum")
        if isinstance(sums, dict) and sums:
            return _compare(data, sums, digest if isinstance(digest, str) else "", version)
    return WorkerProof(reason="its checker names no checksum that can be compared")


def _compare(
    data: Mapping[str, Any], sums: Mapping[str, Any], digest: str, version: StoredVersion
) -> WorkerProof:
    digests, converted = version.digests, _converted_tensors(data, version)
    comparable = [name for name in sums if name in digests and name not in converted]
    if not comparable:
        return WorkerProof(whole=digest, reason="it keeps none of the tensors as they were sent")
    if len(comparable) == len(sums) and digest:
        expected = roll_up({name: digests[name] for name in comparable})
        differs = "" if digest == expected else f"its full_checksum is {digest}, not {expected}"
        return WorkerProof(len(comparable), digest, differs)
    if _tp_size(data) > 1:
        return WorkerProof(
            whole=digest, reason="it reports no digest over whole tensors that can be compared"
        )
    different = [name for name in comparable if sums[name] != digests[name]]
    differs = f"tensor {different[0]!r} and {len(different) - 1} more differ" if different else ""
    return WorkerProof(len(comparable), digest, differs)


def _stage_results(body: object) -> Iterator[dict[str, Any]]:
    rows = body.get("results") if isinstance(body, dict) else None
    for row in rows if isinstance(rows, list) else ():
        data = row.get("data") if isinstance(row, dict) else None
        if isinstance(data, dict):
            yield data


def _converted_tensors(data: Mapping[str, Any], version: StoredVersion) -> set[str]:
    """Names of tensors that the worker keeps in another dtype than they were sent in."""
    rows = data.get("tensor_metadata")
    if not isinstance(rows, dict):
        return set()
    dtypes = {
        name: str(row.get("dtype")).removeprefix("torch.")
        for name, row in rows.items()
        if isinstance(row, dict)
    }
    stored = version.manifest.tensors
    return {
        name for name, dtype in dtypes.items() if name in stored and stored[name].dtype != dtype
    }


def _tp_size(data: Mapping[str, Any]) -> int:
    layout = data.get("layout")
    size = layout.get("tp_size") if isinstance(layout, dict) else 1
    return size if isinstance(size, int) else 1
