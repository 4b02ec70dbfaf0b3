"""Reports of a sync's participants: progress, and results merged for the trainer. Pure.

Invariants: `success`, `message` and `status` are top-level keys of every response and never
contradict the status code; `num_buckets_received` is the count of one participant (note:two-phase
1.3, 1.4). A participant never counts as stalled if it reports nothing, only repeats an old report,
or has received everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, aggregate
from omni_proxy.weight_sync.protocol.trainer_group import WeightSync

FAILED: Final = "failed"
RECEIVING: Final = "receiving"


@dataclass(frozen=True, slots=True)
class ReceiveProgress:
    """A progress report of a participant. `state`: its own name for it. `received`: buckets, bytes.

    `age_secs`: age of the transfer; it distinguishes a new report from a repeated one.
    """

    state: str
    received: tuple[int, int]
    age_secs: float
    error: str = ""


def parse_progress(info: object) -> ReceiveProgress | None:
    """The progress in a /server_info response; None if it has none."""
    report = info.get("weight_sync") if isinstance(info, Mapping) else None
    if not isinstance(report, Mapping) or not isinstance(report.get("state"), str):
        return None
    error = report.get("error")
    # Replicas of the previous release only have the old name.
    received = "bytes_received" if "bytes_received" in report else "bytes_come"
    return ReceiveProgress(
        report["state"],
        (_count(report, "buckets_done"), _count(report, received)),
        _secs(report),
        error if isinstance(error, str) else "",
    )


class StallDetector:
    """Detects that an armed transfer makes no progress, from the time `now` on."""

    def __init__(self, now: float) -> None:
        self._last: dict[str, ReceiveProgress] = {}
        self._progress_at = now

    def update(
        self,
        now: float,
        reports: Mapping[str, ReceiveProgress],
        stall_secs: float,
        first_secs: float,
    ) -> tuple[str, str]:
        """Return why the transfer will not complete, and the participant that failed, if one did.

        ("", "") while it may still complete. The limit is `stall_secs` without progress; before the
        first bytes arrive it is at least `first_secs`.
        """
        for name, report in reports.items():
            if report.state == FAILED and report.error:
                return f"{name}: its receive ended: {report.error}", name
        fresh = {name: report for name, report in reports.items() if self._is_new(name, report)}
        waiting = [name for name, report in fresh.items() if report.state == RECEIVING]
        moved = any(report.received != self._received(name) for name, report in fresh.items())
        self._last |= fresh
        if moved or not waiting:
            self._progress_at = now
        started = any(any(report.received) for report in self._last.values())
        limit = stall_secs if started else max(stall_secs, first_secs)
        if now - self._progress_at < limit:
            return "", ""
        return f"nothing was received for {limit:g} s: {', '.join(waiting)}", ""

    def _is_new(self, name: str, report: ReceiveProgress) -> bool:
        last = self._last.get(name)
        return last is None or (last.state, last.age_secs) != (report.state, report.age_secs)

    def _received(self, name: str) -> tuple[int, int]:
        last = self._last.get(name)
        return last.received if last is not None else (0, 0)


def _count(report: Mapping[str, Any], key: str) -> int:
    value = report.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _secs(report: Mapping[str, Any]) -> float:
    value = report.get("secs")
    return float(value) if isinstance(value, int | float) else 0.0


READY: Final = "ready"
NOT_AWAITED: Final = "its answer was not waited for"
BUCKET_COUNT: Final = "num_buckets_received"
# Copied to the top level if all participants agree: a trainer reads them in the response to
# complete.
COPIED_KEYS: Final = ("cache_epoch", "cache_version", "fp8_kv_cache_postprocess_ran",
                      "fp8_kv_cache_static_scales_updated")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Why a step failed. `cause`: the first failure, or "".

    `status`: HTTP status of the response if the cause is not a participant's result, otherwise 0.
    """

    cause: str = ""
    status: int = 0


NO_FAILURE: Final = StepFailure()


def merge_results(
    path: str,
    results: Sequence[WorkerResult],
    sync: WeightSync,
    failure: StepFailure = NO_FAILURE,
) -> AdminResponse:
    """Merge the participants' results; `failure`: why the step failed, if it did."""
    statuses = sync.participant_statuses()
    more = {name: {"standing": status} for name, status in statuses.items()}
    response = aggregate(path, results, more)
    if not failure.cause and response.ok:
        return response
    message = failure.cause or response.body["message"]
    top = {"success": False, "message": message, "status": "error"}
    status = failure.status or _status_code(results, failure.cause)
    return AdminResponse(status, {**response.body, **top})


def with_ready_status(response: AdminResponse) -> AdminResponse:
    """Set the status of a successful prepare to "ready" instead of "ok"."""
    return replace(response, body={**response.body, "status": READY}) if response.ok else response


def with_bucket_count(response: AdminResponse, results: Sequence[WorkerResult]) -> AdminResponse:
    """Add the lowest bucket count of the participants, and those COPIED_KEYS that all agree on."""
    counts = [_find(result.body, BUCKET_COUNT) for result in results]
    numbers = [count for count in counts if isinstance(count, int)]
    more: dict[str, object] = {BUCKET_COUNT: min(numbers)} if numbers else {}
    for name in COPIED_KEYS:
        values = [_find(result.body, name) for result in results]
        if values and values[0] is not None and all(value == values[0] for value in values):
            more[name] = values[0]
    return replace(response, body={**response.body, **more})


def received_bytes(result: WorkerResult) -> int:
    """The received bytes that the participant reports; 0 if it reports none."""
    nbytes = _find(result.body, "bytes")
    return nbytes if isinstance(nbytes, int) else 0


def _status_code(results: Sequence[WorkerResult], cause: str) -> int:
    """400 if a participant refused with 4xx (the trainer's fault), otherwise 502.

    Only the first failure counts: refusals of other participants may be consequences of it.
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
