"""The JSON of POST and GET /explain: the candidates of a request, the pick, and the alias."""

from __future__ import annotations

from collections.abc import Mapping

from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.explanation import PlacementExplanation
from omni_proxy.routing.disaggregation.pick_record import PickRecord
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.model_aliases import TargetExplanation
from omni_proxy.telemetry.recent_window import FinishedExchange


def explanation_record(explained: PlacementExplanation, need: Requirements) -> dict[str, object]:
    explanation = explained.explanation
    record: dict[str, object] = {
        "need": {
            "model": need.asked_model,
            "stream": need.stream,
            "capabilities": need.capabilities,
            "weights": str(need.version_constraint) if need.version_constraint else None,
        },
        "policy": explained.policy,
        "workers": [_verdict(worker, reasons) for worker, reasons in explanation.reasons],
        "pick": None,
    }
    if explanation.pick is not None:
        picked = explanation.pick
        record["pick"] = _pick_record(picked, explanation.reason, explanation.details)
    prefill = explained.prefill
    if prefill is not None:
        other = prefill.worker and _pick_record(prefill.worker, prefill.reason, prefill.details)
        record["prefill"] = {"policy": prefill.policy, "pick": other, "reason": prefill.reason}
    if explanation.error is not None:
        error = explanation.error
        record["refusal"] = {"status": error.status, "message": error.message, "code": error.code}
    return record


def _pick_record(target: Worker, reason: str, details: Mapping[str, object]) -> dict[str, object]:
    return {**_picked(target), "reason": reason, **details}


def _picked(target: Worker) -> dict[str, object]:
    """The worker; of a data-parallel rank its worker and the rank's index."""
    worker = target.worker
    picked: dict[str, object] = {"worker_id": worker.id, "url": worker.url}
    return {**picked, "rank": target.index} if isinstance(target, DpRank) else picked


def past_record(record: PickRecord, end: FinishedExchange) -> dict[str, object]:
    """The candidates of a past request. `reason` is null if the request went to another worker than
    the recorded pick."""
    foreseen = bool(end.worker) and end.worker == record.foreseen and end.attempts == 1
    return {
        "request_id": end.request_id,
        "policy": record.policy,
        "worker": end.worker or None,
        "reason": record.reason if foreseen else None,
        "total": record.total,
        "workers": [
            {
                "url": candidate.url,
                **({"rank": candidate.rank} if candidate.rank is not None else {}),
                "eligible": not candidate.against,
                "reasons": [candidate.against] if candidate.against else [],
                "in_flight": candidate.in_flight,
                **candidate.facts,
            }
            for candidate in record.candidates
        ],
    }


def alias_record(explanation: TargetExplanation) -> dict[str, object]:
    """The alias that the request names, and its targets. `target`: None if no target has a
    worker."""
    split = explanation.split
    targets = zip(split.models, split.weights, explanation.available, strict=True)
    return {
        "name": split.name,
        "target": explanation.target,
        "reason": explanation.reason,
        "rewrite": split.rewrite,
        "targets": [
            {"model": model, "weight": weight, "available": available}
            for model, weight, available in targets
        ],
    }


def _verdict(worker: Worker, reasons: list[str]) -> dict[str, object]:
    return {
        **_picked(worker),
        "role": worker.role,
        "eligible": not reasons,
        "reasons": reasons,
        "in_flight": worker.in_flight,
        "health_state": worker.health.state.value,
        "weight_version": worker.weight_label,
        "weight_epoch": worker.weight_epoch,
    }
