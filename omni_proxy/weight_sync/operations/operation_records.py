"""JSON of operations: in GET /weights, in the history, and in the error after a wait.

The keys are documented in docs/http.md. Must not change anything.
"""

from __future__ import annotations

from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import WorkerResult


def operation_record(operation: Operation, now: float) -> dict[str, object]:
    return {
        "id": operation.id,
        "path": operation.route.path,
        "caller": operation.caller,
        "step": operation.step.value,
        "age_secs": round(now - operation.requested_at, 3),
        "step_secs": round(now - operation.since, 3) if operation.since else 0.0,
        "workers": worker_rows(operation),
    }


def worker_rows(operation: Operation) -> list[dict[str, object]]:
    """A row for each target: waiting, called, or its result."""
    return [
        {"worker": url, **_progress(operation.results.get(url), called=operation.has_called)}
        for url in operation.targets
    ]


def _progress(result: WorkerResult | None, *, called: bool) -> dict[str, object]:
    if result is None:
        return {"progress": "asked" if called else "waiting"}
    if result.success:
        return {"progress": "done", "seconds": result.secs}
    return {"progress": "failed", "seconds": result.secs, "reason": result.reason}
