"""Replies of many workers to a call of vLLM's dialect, merged like one engine's. Pure.

A trainer that drives one engine reads `status`, `world_size`, `is_paused`, `checksums` at the top
of the response. Invariant: a key is at the top if all workers have the same value, or if the
fleet's value follows from theirs (a sum, all of them); else it is in `results` alone. What all
workers refuse with the same status is refused with it, so that a bad argument is a 400 here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from omni_proxy.admin_ops.results import AdminResponse, WorkerResult

OURS: Final = frozenset(
    ("success", "path", "worker_count", "results", "error", "seconds", "detail")
)
MAX_KEYS: Final = 64  # of a body that are looked at
MAX_ITEMS: Final = 16
DIFFERENT_WEIGHTS: Final = "the workers have different weights"


def as_one(path: str, response: AdminResponse, results: Sequence[WorkerResult]) -> AdminResponse:
    """`response`: the aggregate of `results`, which are of the route with this path."""
    if not response.ok:
        return _refused_alike(response, results)
    bodies = [result.body if isinstance(result.body, dict) else {} for result in results]
    same_words = not any(result.sent_to for result in results)
    body = {**response.body, **(_agreed(bodies) if same_words else {})}
    if (merge := _MERGED.get(path)) is not None:
        body |= merge(bodies)
    if path == "/weight_checker":
        checksums = [sums for each in bodies if isinstance(sums := each.get("checksums"), dict)]
        if _differ(checksums):
            top = {"success": False, "status": "error", "message": DIFFERENT_WEIGHTS}
            return AdminResponse(409, {**response.body, **top})
        if checksums and all(sums == checksums[0] for sums in checksums):
            body["checksums"] = checksums[0]
    return replace(response, body=body)


def _agreed(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Short keys with the same value in all bodies, except those of the proxy's own response."""
    if not bodies:
        return {}
    first, *rest = bodies
    words = {key: first[key] for key in islice(first, MAX_KEYS) if key not in OURS}
    return {
        key: value
        for key, value in words.items()
        if _is_short(value) and all(key in body and body[key] == value for body in rest)
    }


def _is_short(value: object) -> bool:
    """What is long is not compared, nor said twice: it is in the results."""
    if isinstance(value, dict):
        return False
    if not isinstance(value, list):
        return True
    return len(value) <= MAX_ITEMS and not any(isinstance(item, list | dict) for item in value)


def _world_size(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """An engine of the other kind has its ranks in its /server_info."""
    values = [body.get("world_size", body.get("tp_size", 1)) for body in bodies]
    return {"world_size": sum(value for value in values if isinstance(value, int))}


def _all_of(key: str) -> Callable[[Sequence[Mapping[str, object]]], dict[str, object]]:
    def merge(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
        return {key: all(body.get(key) is True for body in bodies)}

    return merge


def _match(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Of a comparison with a baseline: true if it matches everywhere."""
    if not all("match" in body for body in bodies):
        return {}
    differing: set[str] = set()
    for body in bodies:
        names = body.get("mismatches")
        differing |= set(map(str, names)) if isinstance(names, list) else set()
    return {"match": all(body["match"] is True for body in bodies), "mismatches": sorted(differing)}


def _differ(checksums: Sequence[Mapping[str, object]]) -> bool:
    """Whether two workers with the same tensors and ranks name other checksums for them."""
    first = checksums[0] if checksums else {}
    return any(first.keys() == sums.keys() and first != sums for sums in checksums[1:])


_MERGED: Final[Mapping[str, Callable[[Sequence[Mapping[str, object]]], dict[str, object]]]] = {
    "/get_world_size": _world_size,
    "/is_paused": _all_of("is_paused"),
    "/is_sleeping": _all_of("is_sleeping"),
    "/weight_checker": _match,
}


def _refused_alike(response: AdminResponse, results: Sequence[WorkerResult]) -> AdminResponse:
    statuses = {result.status for result in results}
    if len(statuses) != 1 or not all(result.refused for result in results):
        return response
    (status,) = statuses
    first = results[0]
    return AdminResponse(
        status or 502, {**response.body, "message": f"{first.worker}: {first.why}"}
    )
