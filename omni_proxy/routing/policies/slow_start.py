"""Slow start of workers with a small prefix tree.

A worker that has just joined has the smallest tree for a long time and would get every request
without a match. While its tree is below half of the mean it is chosen at most once per 1/share
choices, but not less often than its fair share. Invariant: only `record_choice` and `forget_worker`
change state.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.fleet.worker import Worker

NEW_SHARE = 0.5  # of the mean size
_WHOLE = 1.0 - 1e-9  # one pick, with tolerance for the sum of n times 1/n


class SlowStart:
    """New workers earn `share` of a pick per choice, and accumulate at most one. 0: off."""

    __slots__ = ("_saved", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self._saved: dict[Worker, float] = {}

    def spared(self, candidates: Sequence[Worker], sizes: Sequence[float]) -> list[Worker]:
        """The new workers that can't be chosen now; never all candidates."""
        return [
            worker
            for worker in self._new_workers(candidates, sizes)
            if self._with_earned(worker, len(candidates)) < _WHOLE
        ]

    def record_choice(
        self, picked: Worker, candidates: Sequence[Worker], sizes: Sequence[float]
    ) -> None:
        """`sizes`: the sizes of the trees that the choice was based on."""
        new_workers = self._new_workers(candidates, sizes)
        earned = {worker: self._with_earned(worker, len(candidates)) for worker in new_workers}
        if self._saved:
            for worker in candidates:
                self._saved.pop(worker, None)
        self._saved |= earned
        if picked in earned:
            self._saved[picked] -= 1

    def forget_worker(self, worker: Worker) -> None:
        self._saved.pop(worker, None)

    def _with_earned(self, worker: Worker, candidates: int) -> float:
        return min(1.0, self._saved.get(worker, 1.0) + max(self.share, 1 / candidates))

    def _new_workers(self, candidates: Sequence[Worker], sizes: Sequence[float]) -> list[Worker]:
        if not self.share or self.share >= 1:
            return []
        bound = NEW_SHARE * sum(sizes) / len(sizes)
        return [worker for worker, size in zip(candidates, sizes, strict=True) if size < bound]
