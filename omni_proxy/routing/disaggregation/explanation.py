"""Explains a placement: reasons against each worker for its leg, both picks and their reasons; and
records the candidates of a few picks per second, just before they are made.

Invariant: changes no state of a policy; a worker has no reasons if and only if `pick_placement`
could choose it. The costs of records are bounded for any fleet: a record has at most
`MAX_CANDIDATES` rows, and the interval between two grows with the fleet, so that they take at most
a constant share of the time. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from omni_proxy.config.fields import Role
from omni_proxy.config.schema import DisaggregationConfig
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.pairing import Pairing, Placement, Policies, pick_placement
from omni_proxy.routing.disaggregation.partners import Pools, alone, of_leg, same_weights
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import Explanation, Preview, explain, ineligibility_reasons, with_veto
from omni_proxy.routing.policies import Policy
from omni_proxy.routing.routes import NO_LEGS
from omni_proxy.wire.errors import HttpError

MAX_CANDIDATES: Final = 16
INTERVAL_SECS: Final = 0.5
BURST: Final = 10
BURST_WORKERS: Final = 1000  # of all records of a burst, which may all be made in one loop turn
SECS_PER_WORKER: Final = 0.005
TEXT_CHARS: Final = 200

WITHOUT_PREFILL: Mapping[str, str] = {
    "cached": "the decode worker has enough of the prompt cached to compute the rest itself",
    "fallback": "the decode worker computes the prompt itself: no prefill worker can",
    "no_model": "the request needs no model",
}


@dataclass(frozen=True, slots=True)
class PrefillPick:
    """The prefill leg of an explained placement; without a worker, `reason` explains why."""

    worker: Worker | None
    policy: str
    reason: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlacementExplanation:
    """`explanation`: for the worker that answers the client. `policy`: the one that picked it.
    `prefill`: None if a regular worker takes the request, or no worker does."""

    explanation: Explanation
    policy: str
    prefill: PrefillPick | None = None


class _Previews:
    """`PoolPolicies` with previews, so that picks change no state."""

    def __init__(self, policies: PoolPolicies) -> None:
        self._policies = policies
        self._previews: dict[Role, Preview] = {}

    @property
    def rules(self) -> DisaggregationConfig:
        return self._policies.rules

    def of(self, role: Role) -> Preview:
        preview = self._previews.get(role)
        if preview is None:
            preview = self._previews[role] = Preview(self._policies.of(role))
        return preview

    def uncached_tokens(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> Callable[[Worker], int | None]:
        return self._policies.uncached_tokens(candidates, requirements)

    def record_cached(self, worker: Worker, requirements: Requirements) -> None:
        """Does nothing: a preview sends no prompt."""


def explain_placement(
    fleet: Fleet, need: Requirements, policy: Policy, policies: PoolPolicies, owner: str = ""
) -> PlacementExplanation:
    """Reasons are in registration order."""
    if need.legs is NO_LEGS or not fleet.has_pools:
        return PlacementExplanation(explain(fleet, need, policy, owner), policy.name)
    pairing, previews, regular = Pairing(fleet), _Previews(policies), Preview(policy)
    try:
        reasons = _verdicts(pairing, need, policies, owner)
        placement = pick_placement(pairing, need, Policies(regular, previews), owner=owner)
    except HttpError as error:
        reasons = (
            [(target, ["is not the worker that the request names"]) for target in _targets(fleet)]
            if error.status == 404
            else _verdicts(pairing, need, policies, owner)
        )
        return PlacementExplanation(Explanation(reasons, error=error), policy.name)
    picked_by = regular if placement.worker.role == "regular" else previews.of("decode")
    explanation = Explanation(reasons, placement.worker, picked_by.reason, picked_by.details)
    return PlacementExplanation(explanation, picked_by.name, _prefill_pick(placement, previews))


def _prefill_pick(placement: Placement, previews: _Previews) -> PrefillPick | None:
    if placement.worker.role == "regular":
        return None
    preview = previews.of("prefill")
    if placement.prefill is None:
        return PrefillPick(None, preview.name, WITHOUT_PREFILL[placement.reason])
    return PrefillPick(placement.prefill, preview.name, preview.reason, preview.details)


def _verdicts(
    pairing: Pairing, need: Requirements, policies: PoolPolicies, owner: str
) -> list[tuple[Worker, list[str]]]:
    """Raises HttpError 404."""
    fleet, pools = pairing.fleet, pairing.pools(need)
    lone = alone(pools.decodes, need.legs, fallback=policies.rules.fallback == "decode")
    has_pool_workers = bool(pools.paired or lone)
    verdicts = []
    for worker in _targets(fleet):
        leg = of_leg(fleet, need, worker.role) if worker.role != "regular" else need
        reasons = ineligibility_reasons(fleet, worker, leg, owner, worker.role)
        if not reasons and worker.role == "regular" and has_pool_workers:
            reasons = ["the prefill and decode workers take it"]
        elif not reasons and worker.role == "prefill":
            reasons = _against_prefill(worker, pools, need)
        elif not reasons and worker.role == "decode":
            reasons = _against_decode(worker, pools, lone, need)
        verdicts.append((worker, reasons))
    judged: dict[Worker, list[str]] = {}
    for role in ("prefill", "decode", "regular"):  # each leg is picked among workers of its role
        judged |= with_veto(fleet, [verdict for verdict in verdicts if verdict[0].role == role])
    return [(target, judged[target]) for target, _ in verdicts]


def _targets(fleet: Fleet) -> list[Worker]:
    return [target for worker in fleet.workers for target in worker.dp_ranks or (worker,)]


def _against_prefill(worker: Worker, pools: Pools, need: Requirements) -> list[str]:
    if any(worker in partners for partners in pools.partners.values()):
        return []
    if worker not in pools.prefills:
        return ["is not the worker that the request names"]
    return [f"no decode worker pairs with it: {_mismatch(worker, pools.decodes, need)}"]


def _against_decode(
    worker: Worker, pools: Pools, lone: Sequence[Worker], need: Requirements
) -> list[str]:
    if worker in pools.partners or (worker in lone and not pools.paired):
        return []
    if worker not in pools.decodes:
        return ["is not the worker that the request names"]
    return [f"no prefill worker pairs with it: {_mismatch(worker, pools.prefills, need)}"]


def _mismatch(worker: Worker, others: Sequence[Worker], need: Requirements) -> str:
    if worker.kv_connector not in need.legs.connectors:
        return f"with kv_connector {worker.kv_connector} this route is not served in two legs"
    if not others:
        return "none is eligible"
    others = [other for other in others if other.kv_connector == worker.kv_connector]
    if not others:
        return f"none has kv_connector {worker.kv_connector}"
    others = [other for other in others if other.model == worker.model]
    if not others:
        return f"none has the model {worker.model or 'that is not named'}"
    assert not any(same_weights(other.weight_version, worker.weight_version) for other in others)
    return f"none has the weights {worker.weight_version}"


class Candidate(NamedTuple):
    """A worker, or a rank of it. `against`: why it could not take the request, "" if it could.
    `facts`: the policy's numbers for it, named as in POST /explain."""

    url: str
    rank: int | None
    in_flight: int
    against: str
    facts: dict[str, float]


class PickRecord(NamedTuple):
    """`foreseen` and `reason`: the previewed worker, and why; a random policy may then have picked
    another one. `total`: number of workers and ranks, including those not in `candidates`."""

    policy: str
    foreseen: str
    reason: str
    candidates: tuple[Candidate, ...]
    total: int


def next_record(last_due: float, now: float, fleet: Fleet) -> float:
    """The time from which the next record may be made, if one is made `now`. On average there is
    one per interval; after a pause up to `BURST` may follow each other immediately, fewer in a
    large fleet."""
    workers = len(fleet.workers)
    interval = INTERVAL_SECS + SECS_PER_WORKER * workers
    burst = max(1, min(BURST, BURST_WORKERS // max(1, workers)))
    return max(last_due, now - burst * interval) + interval


def record_pick(
    fleet: Fleet, need: Requirements, policy: Policy, pools: PoolPolicies, owner: str
) -> PickRecord:
    """The record of the pick that would be made now."""
    explained = explain_placement(fleet, need, policy, pools, owner)
    explanation = explained.explanation
    picked = explanation.pick
    ordered = sorted(
        explanation.reasons,
        key=lambda verdict: (verdict[0] is not picked, bool(verdict[1]), verdict[0].in_flight),
    )
    return PickRecord(
        explained.policy,
        picked.worker.url if picked is not None else "",
        explanation.reason[:TEXT_CHARS],
        tuple(
            Candidate(
                target.worker.url,
                target.index if isinstance(target, DpRank) else None,
                target.in_flight,
                "; ".join(reasons)[:TEXT_CHARS],
                _facts_of(target, explanation.details),
            )
            for target, reasons in ordered[:MAX_CANDIDATES]
        ),
        len(ordered),
    )


def _facts_of(target: Worker, details: Mapping[str, object]) -> dict[str, float]:
    """The policy's numbers for this worker."""
    facts: dict[str, float] = {}
    for name, by_url in details.items():
        detail = by_url.get(target.url) if isinstance(by_url, Mapping) else None
        for fact, value in detail.items() if isinstance(detail, Mapping) else ((name, detail),):
            if isinstance(value, int | float) and not isinstance(value, bool):
                facts[str(fact)] = value
    return facts
