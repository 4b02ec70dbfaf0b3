"""Policies that compare in-flight requests per unit of weight. Invariant: equally loaded workers
take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.policy import Policy, RandomBelow
from omni_proxy.routing.policies.weighted_load import CandidateWeights, least, load_word


class LeastRequest(Policy):
    """The fewest exchanges in flight; among ties the next in turn (omni-router.md 8).

    Where all weigh the same the scan starts at the turn and stops at the first idle worker, so a
    fleet with room costs O(1); the turn goes on behind the one that was picked, or a busy worker's
    neighbour would get its turns. Else the least of (in_flight + 1) / weight goes.
    """

    __slots__ = ("_even", "_turn", "_twice", "_weights", "name")

    def __init__(self) -> None:
        self.name = "least_request"
        self._turn = 0
        self._even: Sequence[Worker] | None = None  # a list known to hold equal weights only
        self._twice: list[Worker] = []  # those twice over: a turn may begin anywhere
        self._weights = CandidateWeights()

    def pick(self, candidates: Sequence[Worker], need: Requirements) -> Worker:
        chosen = self._least(candidates)
        self._turn += 1
        return chosen

    def preview_pick(self, candidates: Sequence[Worker], need: Requirements) -> tuple[Worker, str]:
        turn = self._turn
        chosen = self._least(candidates)
        self._turn = turn
        return chosen, f"the least loaded of {len(candidates)}: {load_word(chosen)}"

    def _least(self, candidates: Sequence[Worker]) -> Worker:
        """The turn is its own afterwards."""
        if candidates is not self._even:
            if not self._weights.take(candidates):
                return least(candidates, self._turn)[0]
            self._even = candidates
            self._twice = [*candidates, *candidates]
        count = len(candidates)
        start = self._turn % count
        best = candidates[start]
        fewest = best.in_flight
        if fewest:
            twice, place = self._twice, start
            for at in range(start + 1, start + count):
                worker = twice[at]
                if worker.in_flight < fewest:
                    best, fewest, place = worker, worker.in_flight, at
                    if not fewest:
                        break
            self._turn += place - start
        return best


class PowerOfTwo(Policy):
    """The less loaded of two drawn at random."""

    __slots__ = ("_random_below", "name")

    @classmethod
    def create(cls, routing: RoutingConfig, random_below: RandomBelow, now: float) -> PowerOfTwo:
        return cls(random_below)

    def __init__(self, random_below: RandomBelow) -> None:
        self.name = "power_of_two"
        self._random_below = random_below

    def pick(self, candidates: Sequence[Worker], need: Requirements) -> Worker:
        one, other = self._draw(candidates)
        less = (other.in_flight + 1) * one.weight < (one.in_flight + 1) * other.weight
        return other if less else one

    def preview_pick(self, candidates: Sequence[Worker], need: Requirements) -> tuple[Worker, str]:
        chosen = self.pick(candidates, need)
        return chosen, (
            f"the less loaded of two drawn at random: {load_word(chosen)}; another draw may differ"
        )

    def _draw(self, candidates: Sequence[Worker]) -> tuple[Worker, Worker]:
        count = len(candidates)
        first = self._random_below(count)
        if count == 1:
            return candidates[first], candidates[first]
        second = self._random_below(count - 1)
        second += second >= first
        return candidates[first], candidates[second]
