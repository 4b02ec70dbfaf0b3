"""Why a request goes where it goes: the verdict on each worker, and the pick the policy would make.

Must change nothing: no request is sent, no turn of the policy is used, nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import ineligibility_reasons, pick_worker
from omni_proxy.routing.policies import Policy
from omni_proxy.wire.errors import HttpError


class _Asking(Policy):
    """Previews where `pick_worker` picks, and keeps the reason."""

    __slots__ = ("_asked", "name", "reason", "told")

    def __init__(self, asked: Policy) -> None:
        self.name = asked.name
        self.reason = ""
        self.told: dict[str, object] = {}
        self._asked = asked

    def pick(self, candidates: Sequence[Worker], need: Requirements) -> Worker:
        return self.preview_pick(candidates, need)[0]

    def preview_pick(self, candidates: Sequence[Worker], need: Requirements) -> tuple[Worker, str]:
        chosen, self.reason = self._asked.preview_pick(candidates, need)
        self.told = self._asked.explain_pick(candidates, need)
        return chosen, self.reason


def explain(fleet: Fleet, need: Requirements, policy: Policy, owner: str = "") -> dict[str, object]:
    """JSON-able: need, verdict per worker in registration order, pick or refusal."""
    verdicts = []
    for worker in fleet.workers:
        reasons = ineligibility_reasons(fleet, worker, need, owner)
        verdicts.append(
            {
                "worker_id": worker.id,
                "url": worker.url,
                "eligible": not reasons,
                "reasons": reasons,
                "in_flight": worker.in_flight,
                "health_state": worker.health.state.value,
                "weight_version": worker.weight_version,
                "weight_epoch": worker.weight_epoch,
            }
        )
    told: dict[str, object] = {
        "need": {
            "model": need.model,
            "stream": need.stream,
            "capabilities": need.capabilities,
            "weights": str(need.version_constraint) if need.version_constraint else None,
        },
        "policy": policy.name,
        "workers": verdicts,
        "pick": None,
    }
    try:
        asking = _Asking(policy)
        chosen = pick_worker(fleet, need, asking, owner=owner)
        why = {"reason": asking.reason, **asking.told}
        told["pick"] = {"worker_id": chosen.id, "url": chosen.url, **why}
    except HttpError as refusal:
        told["refusal"] = {
            "status": refusal.status,
            "message": refusal.message,
            "code": refusal.code,
        }
    return told
