"""Memory that a child receives into and this process reads, kept from one receive to the next.

Anonymous files: nothing of them is left in /dev/shm, however a process ends. A block is used again
only after its lease has ended and the last tensor that looks into it was dropped. No torch here
but in `Lease.tensor`.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omni_proxy.process_group.buffers import free_bytes, no_room
from omni_proxy.process_group.mapped_file import mapped
from omni_proxy.process_group.tensor_plan import GroupError

if TYPE_CHECKING:
    import torch


class SharedBlock:
    """One anonymous file; `number` is its name in the child."""

    __slots__ = ("descriptor", "mapping", "nbytes", "number")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.mapping: torch.Tensor | None = None
        self.descriptor = os.memfd_create("omni-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
        except OSError:
            os.close(self.descriptor)
            raise

    def free(self) -> None:
        self.mapping = None
        os.close(self.descriptor)


class Lease:
    """The right to a block's bytes, until it and all its tensors are dropped."""

    def __init__(self, block: SharedBlock, back: Callable[[SharedBlock], None]) -> None:
        self.block = block
        weakref.finalize(self, back, block).atexit = False

    def tensor(self) -> torch.Tensor:
        """The whole block as flat uint8."""
        import torch

        if self.block.mapping is None:
            self.block.mapping = mapped(self.block.descriptor, self.block.nbytes)
        array: Any = self.block.mapping.numpy()[:]
        # As long as somebody looks into it, the lease lasts.
        weakref.finalize(array, _end, [self]).atexit = False
        return torch.from_numpy(array)


def _end(leases: list[Lease]) -> None:
    leases.clear()


class SharedBlocks:
    """All blocks of one receiver, at most `keep_bytes` of them kept while nobody uses them.

    `forget(numbers)` is called for those that were given back to the system.
    """

    def __init__(
        self,
        keep_bytes: int,
        forget: Callable[[tuple[int, ...]], None],
        free: Callable[[], int] = free_bytes,
    ) -> None:
        self._keep_bytes = keep_bytes
        self._forget = forget
        self._free = free
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._kept: list[SharedBlock] = []
        # Filled by finalizers, which may run anywhere, also inside a locked part: so no lock.
        self._back: deque[SharedBlock] = deque()

    def take(self, nbytes: int) -> Lease:
        """Raises GroupError where the machine has not so much memory left."""
        whole = max(nbytes, 1)
        block = self._reused(whole)
        if block is None:
            free = self._free()
            if nbytes > free and self.kept_bytes():
                self.trim(keep_bytes=0)  # better memory for what comes than for what may come
                free = self._free()
            if nbytes > free:
                raise no_room(nbytes, free)
            try:
                block = SharedBlock(next(self._numbers), whole)
            except OSError as error:
                raise GroupError(f"no memory for the announced tensors: {error}") from None
        return Lease(block, self._back.append)

    def kept_bytes(self) -> int:
        self.trim()
        with self._lock:
            return sum(block.nbytes for block in self._kept)

    def trim(self, keep_bytes: int | None = None) -> None:
        """Takes back what was dropped; the oldest go where more is kept than allowed."""
        most = self._keep_bytes if keep_bytes is None else keep_bytes
        gone: list[SharedBlock] = []
        with self._lock:
            while self._back:
                self._kept.append(self._back.popleft())
            while sum(block.nbytes for block in self._kept) > most:
                gone.append(self._kept.pop(0))
        for block in gone:
            block.free()
        if gone:
            self._forget(tuple(block.number for block in gone))

    def _reused(self, nbytes: int) -> SharedBlock | None:
        self.trim()
        with self._lock:
            fitting = [each for each in self._kept if each.nbytes >= nbytes]
            if not fitting:
                return None
            best = min(fitting, key=lambda block: block.nbytes)
            self._kept.remove(best)
            return best
