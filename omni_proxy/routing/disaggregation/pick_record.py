"""Records of the candidates when a worker was picked, made for a few requests per second.

Invariant: costs are bounded for any fleet: a record has at most `MAX_CANDIDATES` rows, and the
interval between two records grows with the fleet, so that they take at most a constant share of
the time. A record is made by `explain_placement` just before the pick and changes no state. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.explanation import explain_placement
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies import Policy

MAX_CANDIDATES: Final = 16
INTERVAL_SECS: Final = 0.5
BURST: Final = 10
BURST_WORKERS: Final = 1000  # of all records of a burst, which may all be made in one loop turn
SECS_PER_WORKER: Final = 0.005
TEXT_CHARS: Final = 200


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
