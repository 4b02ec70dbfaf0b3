"""What a request could choose among when its worker was picked: kept for a few requests a second.

Invariant: bounded, whatever the fleet: `MOST_CANDIDATES` rows, and the interval between two records
grows with the fleet, so that making them costs a constant share of the time at most. A record is
made by `explain_placement` the moment before the pick, so it changes nothing. Pure.
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

MOST_CANDIDATES: Final = 16
INTERVAL_SECS: Final = 0.5
BURST: Final = 10
BURST_WORKERS: Final = 1000  # of all records of a burst together: they may be one turn of the loop
SECS_PER_WORKER: Final = 0.005
TEXT_CHARS: Final = 200


class Candidate(NamedTuple):
    """A worker, or a rank of it. `against`: why it could not take the request, "" if it could.
    `facts`: what the policy knew of it, by the names of POST /explain."""

    url: str
    rank: int | None
    in_flight: int
    against: str
    facts: dict[str, float]


class PickRecord(NamedTuple):
    """`foreseen` and `reason`: the worker that the policy was to pick, and why; a policy that draws
    lots may have picked another one. `total`: workers and ranks, those that are left out too."""

    policy: str
    foreseen: str
    reason: str
    candidates: tuple[Candidate, ...]
    total: int


def next_record(last_due: float, now: float, fleet: Fleet) -> float:
    """From when on the next one may be made, with one made `now`. The mean is one in an interval;
    after a while without requests, up to `BURST` may follow each other at once, fewer in a large
    fleet."""
    workers = len(fleet.workers)
    interval = INTERVAL_SECS + SECS_PER_WORKER * workers
    burst = max(1, min(BURST, BURST_WORKERS // max(1, workers)))
    return max(last_due, now - burst * interval) + interval


def record_pick(
    fleet: Fleet, need: Requirements, policy: Policy, pools: PoolPolicies, owner: str
) -> PickRecord:
    """Of the pick that would be made now."""
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
            for target, reasons in ordered[:MOST_CANDIDATES]
        ),
        len(ordered),
    )


def _facts_of(target: Worker, details: Mapping[str, object]) -> dict[str, float]:
    """The numbers that the policy knows of this worker."""
    facts: dict[str, float] = {}
    for name, by_url in details.items():
        known = by_url.get(target.url) if isinstance(by_url, Mapping) else None
        for each, value in known.items() if isinstance(known, Mapping) else ((name, known),):
            if isinstance(value, int | float) and not isinstance(value, bool):
                facts[str(each)] = value
    return facts
