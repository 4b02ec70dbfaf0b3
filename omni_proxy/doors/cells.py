"""Which cells of the board are free: each worker has one of its own.

Invariant: no two that were taken and not given back are the same, as long as there are any. The one
that was given back longest ago is taken first: a process that has not heard yet of a worker's end
may write to its cell once more. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class FreeCells:
    """`count` cells, from 1 on; the last one is for all that find no other."""

    def __init__(self, count: int) -> None:
        self.highest = 0  # that was ever taken
        self._last = count
        self._free: deque[int] = deque()

    def take(self, in_use: Callable[[int], bool]) -> int:
        """`in_use`: something is still counted there."""
        if self.highest < self._last - 1:
            self.highest += 1
            return self.highest
        for _ in range(len(self._free)):
            cell = self._free.popleft()
            if not in_use(cell):
                return cell
            self._free.append(cell)
        self.highest = self._last
        return self._last

    def give_back(self, cell: int) -> None:
        if cell != self._last:
            self._free.append(cell)
