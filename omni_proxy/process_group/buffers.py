"""Memory that bytes are received into, kept from one receive to the next.

Receiving into memory that was never touched costs three times as much as into memory that was
(weight-sync.md 0.10). A block comes back by itself when the last tensor that looks into it is
dropped, and only then: it is never written to while somebody may still read.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.process_group.tensor_plan import GroupError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

PAGE_BYTES: Final = 4096
KEEP_BYTES: Final = 1 << 30
MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Memory that could be taken now: the machine's, or the container's where that is less."""
    shown = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    free = int(shown["MemAvailable"].split()[0]) * 1024
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(
            line.split(" ", 1) for line in (CGROUP / "memory.stat").read_text().splitlines()
        )
    except OSError:
        return free
    if limit == "max":
        return free
    # Pages of files are counted as used, and given up first.
    return min(free, int(limit) - used + int(statistics.get("inactive_file", 0)))


def no_room(wanted: int, free: int) -> GroupError:
    return GroupError(
        f"the announced tensors need {wanted} bytes, and there is memory for {max(free, 0)}: send "
        "them in smaller buckets"
    )


class Buffers:
    """Blocks of CPU memory, at most `keep_bytes` of them kept while nobody uses them."""

    def __init__(self, keep_bytes: int = KEEP_BYTES, free: Callable[[], int] = free_bytes) -> None:
        self._keep_bytes = keep_bytes
        self._free = free
        self._lock = threading.Lock()
        self._kept: list[npt.NDArray[np.uint8]] = []
        # Filled by finalizers, which may run anywhere, also inside a locked part: so no lock.
        self._back: deque[npt.NDArray[np.uint8]] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of touched memory with whatever was in it.

        Raises GroupError where the machine has not so much memory left.
        """
        import torch

        # Never none at all: numpy gives that strides which torch refuses to view as another dtype.
        whole = max(nbytes, 1)
        block = self._reused(whole)
        if block is None:
            free = self._free()
            if nbytes > free and self.kept_bytes():
                self.clear()  # better memory for what comes than for what may come
                free = self._free()
            if nbytes > free:
                raise no_room(nbytes, free)
            block = torch.empty(whole, dtype=torch.uint8).numpy()
            block[::PAGE_BYTES] = 0
        part: Any = block[:whole]
        weakref.finalize(part, self._back.append, block).atexit = False
        return torch.from_numpy(part)[:nbytes]

    def kept_bytes(self) -> int:
        with self._lock:
            self._sort_in()
            return sum(block.nbytes for block in self._kept)

    def clear(self) -> None:
        """Gives all unused memory back to the system."""
        with self._lock:
            self._sort_in()
            self._kept.clear()

    def _reused(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        with self._lock:
            self._sort_in()
            fitting = [each for each in self._kept if each.nbytes >= nbytes]
            if not fitting:
                return None
            best = min(fitting, key=lambda block: block.nbytes)
            self._kept = [each for each in self._kept if each is not best]
            return best

    def _sort_in(self) -> None:
        """Takes back what was dropped; the oldest go where more is kept than allowed."""
        while self._back:
            self._kept.append(self._back.popleft())
        while self._kept and sum(block.nbytes for block in self._kept) > self._keep_bytes:
            self._kept.pop(0)
