"""Policies that compare in-flight requests per unit of weight, and helpers for weights and loads.

Invariants: equally loaded workers are picked in turn. A list of candidates is checked once and then
recognised by identity: a list that a policy was given never changes, and after a change of weights
the fleet returns new lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker, WorkerLoad
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.policy import Policy, RandomBelow


class CandidateWeights:
    """The weights of the latest list of candidates."""

    __slots__ = ("_of", "even", "mean", "total")

    def __init__(self) -> None:
        self._of: Sequence[Worker] | None = None
        self.even = True
        self.total = 0
        self.mean = 0.0

    def take(self, candidates: Sequence[Worker]) -> bool:
        """Examine these candidates; returns `even`: whether all weights are equal."""
        if candidates is not self._of:
            weights = [worker.weight for worker in candidates]
            self._of = candidates
            self.even = min(weights) == max(weights)
            self.total = sum(weights)
            self.mean = self.total / len(weights)
        return self.even


def load_of(worker: Worker) -> float:
    """Requests in flight, those at other proxies smoothed: what policies compare. Proxies
    that all followed a step at once would all pick the same worker.

    Loops over all candidates have it inlined, because calls would take half as long again;
    `test_load_of` compares every policy with this sum."""
    return worker.in_flight + worker.load_offset


def fill(worker: Worker) -> float:
    """The worker's `load_of` with one more request, per unit of its weight."""
    return (worker.in_flight + worker.load_offset + 1) / worker.weight


def least(candidates: Sequence[Worker], offset: int) -> tuple[Worker, int]:
    """The least loaded worker, and how many have that load; `offset` rotates among these."""
    fills = [  # inlined: fill
        (worker.in_flight + worker.load_offset + 1) / worker.weight for worker in candidates
    ]
    lowest = min(fills)
    ties = [worker for worker, full in zip(candidates, fills, strict=True) if full == lowest]
    return ties[offset % len(ties)], len(ties)


def load_word(worker: Worker) -> str:
    """`2 in flight`, with the weight if it is not 1."""
    weight = f", weight {worker.weight}" if worker.weight != 1 else ""
    return f"{worker.in_flight} in flight{weight}"


class LeastRequest(Policy):
    """The worker with the fewest exchanges in flight; ties are picked in turn (note:omni-router 8).

    With equal weights the scan starts at the turn and stops at the first idle worker, so it costs
    O(1) in a fleet with idle workers. The next turn starts after the picked worker: otherwise the
    neighbour of a busy worker would also get its requests. With different weights the worker with
    the lowest (in_flight + 1) / weight is picked.
    """

    reads_prompts = False
    __slots__ = ("_even", "_scans", "_turn", "_twice", "_weights", "name")

    def __init__(self) -> None:
        self.name = "least_request"
        self._turn = 0
        self._even: Sequence[Worker] | None = None  # a list known to hold equal weights only
        self._twice: list[Worker] = []  # `_even` repeated: a scan may start anywhere
        # By start: the indexes in `_twice` of all others. Creating a range costs more than a scan.
        self._scans: list[range | None] = []
        self._weights = CandidateWeights()

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        if candidates is not self._even:
            if not self._weights.take(candidates):
                picked = least(candidates, self._turn)[0]
                self._turn += 1
                return picked
            self._even = candidates
            self._twice = [*candidates, *candidates]
            self._scans = [None] * len(candidates)
        count, offset = len(candidates), self._turn
        start = offset % count
        best: WorkerLoad = candidates[start]
        # inlined: load_of
        fewest = best.in_flight + best.load_offset
        if fewest > 0:
            twice, place = self._twice, start
            worker: WorkerLoad
            scan = self._scans[start]
            if scan is None:
                scan = self._scans[start] = range(start + 1, start + count)
            for index in scan:
                worker = twice[index]
                load = worker.in_flight + worker.load_offset
                if load < fewest:
                    best, fewest, place = worker, load, index
                    if load <= 0:
                        break
            offset += place - start
        self._turn = offset + 1
        return best  # type: ignore[return-value]

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        offset = self._turn
        picked = self.pick(candidates, requirements)
        self._turn = offset
        return picked, f"the least loaded of {len(candidates)}: {load_word(picked)}"


class PowerOfTwo(Policy):
    """The less loaded of two workers drawn at random."""

    reads_prompts = False
    __slots__ = ("_random_below", "name")

    @classmethod
    def create(cls, routing: RoutingConfig, random_below: RandomBelow, now: float) -> PowerOfTwo:
        return cls(random_below)

    def __init__(self, random_below: RandomBelow) -> None:
        self.name = "power_of_two"
        self._random_below = random_below

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        first, second = self._draw(candidates)
        return second if fill(second) < fill(first) else first

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        picked = self.pick(candidates, requirements)
        return picked, (
            f"the less loaded of two drawn at random: {load_word(picked)}; another draw may differ"
        )

    def _draw(self, candidates: Sequence[Worker]) -> tuple[Worker, Worker]:
        count = len(candidates)
        first = self._random_below(count)
        if count == 1:
            return candidates[first], candidates[first]
        second = self._random_below(count - 1)
        second += second >= first
        return candidates[first], candidates[second]
