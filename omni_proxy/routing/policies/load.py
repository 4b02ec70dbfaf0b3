"""Policies that look at in-flight counts. Invariant: equally loaded workers take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_proxy.fleet.worker import Worker


class LeastRequest:
    """The fewest exchanges in flight; among ties the next in turn.

    The scan starts at the turn and stops at the first idle worker, so a fleet with room costs O(1).
    """

    __slots__ = ("_turn", "name")

    def __init__(self) -> None:
        self.name = "least_request"
        self._turn = 0

    def pick(self, candidates: Sequence[Worker]) -> Worker:
        count = len(candidates)
        start = self._turn % count
        self._turn += 1
        best = candidates[start]
        if best.in_flight == 0:
            return best
        for step in range(1, count):
            worker = candidates[(start + step) % count]
            if worker.in_flight < best.in_flight:
                best = worker
                if best.in_flight == 0:
                    break
        return best


class PowerOfTwo:
    """The less loaded of two drawn at random."""

    __slots__ = ("_below", "name")

    def __init__(self, below: Callable[[int], int]) -> None:
        self.name = "power_of_two"
        self._below = below

    def pick(self, candidates: Sequence[Worker]) -> Worker:
        count = len(candidates)
        first = self._below(count)
        if count == 1:
            return candidates[first]
        second = self._below(count - 1)
        second += second >= first
        one, other = candidates[first], candidates[second]
        return other if other.in_flight < one.in_flight else one
