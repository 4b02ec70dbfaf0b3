"""Responses to a trainer in a weight sync: every member's result, and one overall result. Pure.

Invariant: `success`, `message` and `status` are top-level keys of every response and never
contradict the status code; `num_buckets_received` is the count of one member (two-phase.md 1.3,
1.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, aggregate
from omni_proxy.weight_sync.protocol.sync import WeightSync

READY: Final = "ready"
NOT_AWAITED: Final = "its answer was not waited for"
BUCKET_COUNT: Final = "num_buckets_received"
# Copied to the top level where the members agree: a trainer reads them in a response to complete.
COPIED_KEYS: Final = ("cache_epoch", "cache_version", "fp8_kv_cache_postprocess_ran",
                      "fp8_kv_cache_static_scales_updated")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepFailure:
    """`cause`: the first one. `status`: of the response, if the cause is not a member's result."""

    cause: str = ""
    status: int = 0


NO_FAILURE: Final = StepFailure()


def merge_results(
    path: str,
    results: Sequence[WorkerResult],
    sync: WeightSync,
    failure: StepFailure = NO_FAILURE,
) -> AdminResponse:
    """One response for all members' results; `failure`: why the step failed, if it did."""
    statuses = sync.member_statuses()
    more = {name: {"standing": status} for name, status in statuses.items()}
    response = aggregate(path, results, more)
    if not failure.cause and response.ok:
        return response
    message = failure.cause or response.body["message"]
    top = {"success": False, "message": message, "status": "error"}
    status = failure.status or _status_code(results, failure.cause)
    return AdminResponse(status, {**response.body, **top})


def with_ready_status(response: AdminResponse) -> AdminResponse:
    """A successful prepare has the status "ready" in place of "ok"."""
    return replace(response, body={**response.body, "status": READY}) if response.ok else response


def with_bucket_count(response: AdminResponse, results: Sequence[WorkerResult]) -> AdminResponse:
    """Add the bucket count (the lowest of all members), and COPIED_KEYS where members agree."""
    counts = [_find(result.body, BUCKET_COUNT) for result in results]
    numbers = [count for count in counts if isinstance(count, int)]
    more: dict[str, object] = {BUCKET_COUNT: min(numbers)} if numbers else {}
    for name in COPIED_KEYS:
        values = [_find(result.body, name) for result in results]
        if values and values[0] is not None and all(value == values[0] for value in values):
            more[name] = values[0]
    return replace(response, body={**response.body, **more})


def received_bytes(result: WorkerResult) -> int:
    """The received bytes that the member reports; 0 if it reports none."""
    nbytes = _find(result.body, "bytes")
    return nbytes if isinstance(nbytes, int) else 0


def _status_code(results: Sequence[WorkerResult], cause: str) -> int:
    """400 if a member refused with 4xx (the trainer's fault), else 502.

    The result that is the first cause decides: refusals of other members may only follow from it.
    """
    failed = [r for r in results if not r.success and r.error != NOT_AWAITED]
    matching = [result for result in failed if cause == f"{result.worker}: {result.reason}"]
    return 400 if failed and (matching or failed)[0].refused else 502


def _find(body: object, name: str) -> object:
    return next((part[name] for part in _parts(body) if part.get(name) is not None), None)


def _parts(body: object) -> Iterator[Mapping[str, object]]:
    """The body itself, then the data of each stage."""
    if not isinstance(body, dict):
        return
    yield body
    results = body.get("results")
    for row in results if isinstance(results, list) else ():
        data = row.get("data") if isinstance(row, dict) else None
        if isinstance(data, dict):
            yield data
