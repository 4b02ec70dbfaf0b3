"""Why a request goes where it goes: every worker's verdict, and the pick the policy would make now.

Nothing is sent and no policy's turn is spent: the pick is made on a copy.
"""

from __future__ import annotations

import copy

from omni_proxy.fleet.registry import Fleet
from omni_proxy.routing.inspect import Need
from omni_proxy.routing.pick import choose, reasons_against
from omni_proxy.routing.policies import Policy
from omni_proxy.wire.errors import Refusal


def explain(fleet: Fleet, need: Need, policy: Policy, owner: str = "") -> dict[str, object]:
    """JSON-able: need, verdict per worker in registration order, pick or refusal."""
    verdicts = []
    for worker in fleet.workers:
        reasons = reasons_against(fleet, worker, need, owner)
        verdicts.append(
            {
                "worker_id": worker.id,
                "url": worker.url,
                "eligible": not reasons,
                "reasons": reasons,
                "in_flight": worker.in_flight,
                "health_state": worker.machine.state.value,
            }
        )
    told: dict[str, object] = {
        "need": {
            "model": need.model,
            "stream": need.stream,
            "capabilities": need.capabilities,
        },
        "policy": policy.name,
        "workers": verdicts,
        "pick": None,
    }
    try:
        chosen = choose(fleet, need, copy.copy(policy), owner=owner)
        told["pick"] = {"worker_id": chosen.id, "url": chosen.url}
    except Refusal as refusal:
        told["refusal"] = {
            "status": refusal.status,
            "message": refusal.message,
            "code": refusal.code,
        }
    return told
