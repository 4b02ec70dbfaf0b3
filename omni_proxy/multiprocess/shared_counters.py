"""The shared counters: requests in flight, in memory that all processes share.

`SharedCounters` is the memory, one row of cells for each process; `FreeSlots` says which cells are
free. Invariant: every cell has one writer, the process whose row it is in, so nothing is lost
without locks; the main process takes a row over when its process has exited. Row 0 is the main
process's; cell 0 of a row counts all requests of its process, the other cells one worker each.
A cell that was released longest ago is reused first, since a process that does not know yet that
its worker is gone may write to it once more.
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
    """A full memory barrier: earlier writes are visible to all before anything is read after it.

    Without it a processor may delay a write behind later reads, so that of two processes that count
    and then look neither sees the other. Releasing and acquiring a lock prevents that.
    """
    _fence.release()
    _fence.acquire()


class SharedCounters:
    """A large mapping, of which only the pages that are used take memory."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        size = ROWS * CELLS * CELL_BYTES
        self._cells = memoryview(mmap.mmap(descriptor, size)).cast("I")

    @classmethod
    def create(cls) -> SharedCounters:
        """Raises OSError."""
        descriptor = os.memfd_create("omni-proxy-counts", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, ROWS * CELLS * CELL_BYTES)
        return cls(descriptor)

    def row(self, index: int) -> Cells:
        return self._cells[index * CELLS : (index + 1) * CELLS]

    def clear(self, index: int, upto: int) -> None:
        """Zero the row of a process that has exited. `upto`: the highest cell."""
        row = self.row(index)
        for cell in range(upto + 1):
            if row[cell]:
                row[cell] = 0


class FreeSlots:
    """`count` cells, from 1 on; the last one is shared by all that find none free. Pure."""

    def __init__(self, count: int) -> None:
        self.highest = 0  # that was ever in use
        self._last = count
        self._free: deque[int] = deque()

    def acquire(self, in_use: Callable[[int], bool]) -> int:
        """`in_use(cell)`: something is still counted there."""
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

    def release(self, cell: int) -> None:
        if cell != self._last:
            self._free.append(cell)
