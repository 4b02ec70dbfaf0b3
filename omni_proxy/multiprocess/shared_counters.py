"""The board: what is in flight, counted in memory that all processes share.

Invariant: every cell has one writer, the process whose row it is in, so nothing is lost without any
lock; a row passes to control when its process has ended. Row 0 is control's own; cell 0 of a row
counts all of its process, the others one worker each; who has which `multiprocess.shared_counters` knows.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final

ROWS: Final = 1025  # [server] processes has at most 1024
CELLS: Final = 1 << 16
CELL_BYTES: Final = 4

Cells = memoryview  # of unsigned 32-bit integers

_fence = Lock()
_fence.acquire()


def fence() -> None:
    """Whatever was written before is seen by all before anything is read after.

    A processor may keep a write back until later reads are done, so that of two who count and then
    look neither would see the other. It keeps none back over an unlock and a lock.
    """
    _fence.release()
    _fence.acquire()


class SharedCounters:
    """268 MB of addresses; of memory, a page for each 1024 workers and process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        size = ROWS * CELLS * CELL_BYTES
        self._cells = memoryview(mmap.mmap(descriptor, size)).cast("I")

    @classmethod
    def made(cls) -> SharedCounters:
        """Raises OSError."""
        descriptor = os.memfd_create("omni-proxy-counts", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, ROWS * CELLS * CELL_BYTES)
        return cls(descriptor)

    def row(self, index: int) -> Cells:
        return self._cells[index * CELLS : (index + 1) * CELLS]

    def clear(self, index: int, upto: int) -> None:
        """Its process has ended: what it had in flight is no more. `upto`: the highest cell."""
        row = self.row(index)
        for cell in range(upto + 1):
            if row[cell]:
                row[cell] = 0


# Which cells of the board are free: each worker has one of its own.
#
# Invariant: no two that were taken and not given back are the same, as long as there are any. The one
# that was given back longest ago is taken first: a process that has not heard yet of a worker's end
# may write to its cell once more. Pure.


class FreeSlots:
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
