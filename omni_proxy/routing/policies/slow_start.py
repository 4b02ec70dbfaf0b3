"""How much of what matches nowhere a worker with a small tree may get.

The smallest tree is that of a worker that has just come, and it stays the smallest for long: by the
plain rule it would get every such request until it caught up. Invariant: while its tree is below
half of the mean, a worker is chosen at most once per 1/share choices, yet never less often than its
fair turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.fleet.worker import Worker

YOUNG = 0.5  # of the mean size
_WHOLE = 1.0 - 1e-9  # 1/n summed n times


class SlowStart:
    """Young workers earn `share` of a turn per choice and save up one turn at most. 0 is off."""

    __slots__ = ("_saved", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self._saved: dict[Worker, float] = {}

    def spared(self, candidates: Sequence[Worker], sizes: Sequence[float]) -> list[Worker]:
        """Who can't be chosen now; never all of them."""
        return [
            worker
            for worker in self._young(candidates, sizes)
            if self._with_earned(worker, len(candidates)) < _WHOLE
        ]

    def chose(self, chosen: Worker, candidates: Sequence[Worker], sizes: Sequence[float]) -> None:
        """`sizes` are those that the choice was made by."""
        young = self._young(candidates, sizes)
        earned = {worker: self._with_earned(worker, len(candidates)) for worker in young}
        if self._saved:
            for worker in candidates:
                self._saved.pop(worker, None)
        self._saved |= earned
        if chosen in earned:
            self._saved[chosen] -= 1

    def forget(self, worker: Worker) -> None:
        self._saved.pop(worker, None)

    def _with_earned(self, worker: Worker, candidates: int) -> float:
        return min(1.0, self._saved.get(worker, 1.0) + max(self.share, 1 / candidates))

    def _young(self, candidates: Sequence[Worker], sizes: Sequence[float]) -> list[Worker]:
        if not self.share or self.share >= 1:
            return []
        bound = YOUNG * sum(sizes) / len(sizes)
        return [worker for worker, size in zip(candidates, sizes, strict=True) if size < bound]
