"""The weights and loads of candidates: whether weights differ, and the least loaded worker.

Invariant: a list of candidates is checked once and then recognised by identity. A list handed to a
policy never changes, and a change of weight makes the fleet hand out new lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.fleet.worker import Worker


class CandidateWeights:
    """The weights of the candidates that were last asked about."""

    __slots__ = ("_of", "even", "mean", "total")

    def __init__(self) -> None:
        self._of: Sequence[Worker] | None = None
        self.even = True
        self.total = 0
        self.mean = 0.0

    def take(self, candidates: Sequence[Worker]) -> bool:
        """Look at these; the result is `even`: whether all weigh the same."""
        if candidates is not self._of:
            weights = [worker.weight for worker in candidates]
            self._of = candidates
            self.even = min(weights) == max(weights)
            self.total = sum(weights)
            self.mean = self.total / len(weights)
        return self.even


def fill(worker: Worker) -> float:
    """How full it would be with one request more, per unit of its weight."""
    return (worker.in_flight + 1) / worker.weight


def least(candidates: Sequence[Worker], turn: int) -> tuple[Worker, int]:
    """The least full in its turn, and how many are as full as it."""
    fills = [(worker.in_flight + 1) / worker.weight for worker in candidates]  # as `fill`, inline
    lowest = min(fills)
    ties = [worker for worker, full in zip(candidates, fills, strict=True) if full == lowest]
    return ties[turn % len(ties)], len(ties)


def load_word(worker: Worker) -> str:
    """`2 in flight`, with the weight where it has one of its own."""
    weight = f", weight {worker.weight}" if worker.weight != 1 else ""
    return f"{worker.in_flight} in flight{weight}"
