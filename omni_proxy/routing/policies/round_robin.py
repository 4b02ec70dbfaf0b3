"""Policies that ignore load: smooth weighted round robin, and random."""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.least_request import CandidateWeights
from omni_proxy.routing.policies.policy import Policy, RandomBelow


class RoundRobin(Policy):
    """One counter over all requests, taken modulo the number of candidates (note:omni-router 8).

    If weights differ, smooth weighted round robin: per request each candidate gains its weight as
    credit, the one with the most credit is picked and loses the sum of all weights. This avoids
    bursts to heavy workers.
    """

    reads_prompts = False
    __slots__ = ("_credits", "_even", "_turn", "_weights", "name")

    def __init__(self) -> None:
        self.name = "round_robin"
        self._turn = 0
        self._even: Sequence[Worker] | None = None  # a list known to hold equal weights only
        self._weights = CandidateWeights()
        self._credits: dict[Worker, int] = {}

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        if candidates is not self._even:
            if not self._weights.take(candidates):
                return self._pick_weighted(candidates)
            self._even = candidates
        picked = candidates[self._turn % len(candidates)]
        self._turn += 1
        return picked

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        if self._weights.take(candidates):
            index = self._turn % len(candidates)
            return candidates[index], f"next in turn: {index + 1} of {len(candidates)}"
        picked = self._highest_credit(candidates)
        share = f"{picked.weight} of {self._weights.total}"
        return picked, f"next in turn: by weight it gets {share} requests"

    def forget_worker(self, worker: Worker) -> None:
        self._credits.pop(worker, None)

    def _highest_credit(self, candidates: Sequence[Worker]) -> Worker:
        earned = self._credits
        return max(candidates, key=lambda worker: earned.get(worker, 0) + worker.weight)

    def _pick_weighted(self, candidates: Sequence[Worker]) -> Worker:
        picked = self._highest_credit(candidates)
        for worker in candidates:
            self._credits[worker] = self._credits.get(worker, 0) + worker.weight
        self._credits[picked] -= self._weights.total
        return picked


class Random(Policy):
    """Random by weight, for diagnosis."""

    reads_prompts = False
    __slots__ = ("_random_below", "_weights", "name")

    @classmethod
    def create(cls, routing: RoutingConfig, random_below: RandomBelow, now: float) -> Random:
        return cls(random_below)

    def __init__(self, random_below: RandomBelow) -> None:
        self.name = "random"
        self._random_below = random_below
        self._weights = CandidateWeights()

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        if self._weights.take(candidates):
            return candidates[self._random_below(len(candidates))]
        drawn = self._random_below(self._weights.total)
        for worker in candidates:
            drawn -= worker.weight
            if drawn < 0:
                return worker
        raise AssertionError("a draw beyond the sum of the weights")

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        suffix = "" if self._weights.take(candidates) else " by weight"
        return self.pick(
            candidates, requirements
        ), f"drawn at random{suffix}; another draw may differ"
