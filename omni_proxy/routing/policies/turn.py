"""Policies that look at no load: turns, and chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_proxy.fleet.worker import Worker


class RoundRobin:
    """One counter over all requests, taken modulo this request's candidates (omni-router.md 8)."""

    __slots__ = ("_turn", "name")

    def __init__(self) -> None:
        self.name = "round_robin"
        self._turn = 0

    def pick(self, candidates: Sequence[Worker]) -> Worker:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return chosen


class Random:
    """Uniform; a diagnostic policy."""

    __slots__ = ("_below", "name")

    def __init__(self, below: Callable[[int], int]) -> None:
        self.name = "random"
        self._below = below

    def pick(self, candidates: Sequence[Worker]) -> Worker:
        return candidates[self._below(len(candidates))]
