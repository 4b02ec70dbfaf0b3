"""The JSON of POST /explain: the requirements, a verdict on each worker, the pick or the error.

Invariant: the keys are those of docs/http.md; rows are in registration order. Must decide nothing:
`routing.pick.explain` does.
"""

from __future__ import annotations

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import Explanation


def explanation_record(
    explanation: Explanation, need: Requirements, policy: str
) -> dict[str, object]:
    record: dict[str, object] = {
        "need": {
            "model": need.model,
            "stream": need.stream,
            "capabilities": need.capabilities,
            "weights": str(need.version_constraint) if need.version_constraint else None,
        },
        "policy": policy,
        "workers": [_verdict(worker, reasons) for worker, reasons in explanation.reasons],
        "pick": None,
    }
    if explanation.pick is not None:
        record["pick"] = {
            "worker_id": explanation.pick.id,
            "url": explanation.pick.url,
            "reason": explanation.reason,
            **explanation.details,
        }
    if explanation.error is not None:
        error = explanation.error
        record["refusal"] = {"status": error.status, "message": error.message, "code": error.code}
    return record


def _verdict(worker: Worker, reasons: list[str]) -> dict[str, object]:
    return {
        "worker_id": worker.id,
        "url": worker.url,
        "eligible": not reasons,
        "reasons": reasons,
        "in_flight": worker.in_flight,
        "health_state": worker.health.state.value,
        "weight_version": worker.weight_version,
        "weight_epoch": worker.weight_epoch,
    }
