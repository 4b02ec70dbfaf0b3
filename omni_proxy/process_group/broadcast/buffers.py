"""Memory for received bytes, reused from one receive to the next.

Reuse matters because a first touch of fresh pages costs more than the receive
(note:weight-sync 0.10). `BufferPool` is memory of this process; `SharedBlockPool` has anonymous
files that a child process receives into and this process reads; they leave nothing in /dev/shm,
however a process ends. Invariant: a block is reused only after the last tensor that views it was
dropped, so it is never written while a reader may still use it.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.process_group.broadcast.mapped_file import PAGE_BYTES, map_file, out_of_memory_error
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.system.memory import free_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

KEEP_BYTES: Final = 1 << 30


class BufferPool:
    """Blocks of CPU memory; at most `keep_bytes` of unused ones are kept."""

    def __init__(self, keep_bytes: int = KEEP_BYTES, free: Callable[[], int] = free_bytes) -> None:
        self._keep_bytes = keep_bytes
        self._free = free
        self._lock = threading.Lock()
        self._unused: list[npt.NDArray[np.uint8]] = []
        # Lock-free: finalizers fill it, and may run anywhere, also while the lock is held.
        self._returned: deque[npt.NDArray[np.uint8]] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns a flat uint8 tensor of touched memory with undefined content.

        Raises GroupError if the machine has less free memory.
        """
        import torch

        # At least 1: numpy gives an empty array strides that torch refuses to view.
        size = max(nbytes, 1)
        block = self._take_unused(size)
        if block is None:
            free = self._free()
            if nbytes > free and self.kept_bytes():
                self.clear()  # the announced tensors matter more than a future receive
                free = self._free()
            if nbytes > free:
                raise out_of_memory_error(nbytes, free)
            block = torch.empty(size, dtype=torch.uint8).numpy()
            block[::PAGE_BYTES] = 0
        view: Any = block[:size]
        weakref.finalize(view, self._returned.append, block).atexit = False
        return torch.from_numpy(view)[:nbytes]

    def kept_bytes(self) -> int:
        with self._lock:
            self._collect_returned()
            return sum(block.nbytes for block in self._unused)

    def clear(self) -> None:
        """Frees all unused memory."""
        with self._lock:
            self._collect_returned()
            self._unused.clear()

    def _take_unused(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        with self._lock:
            self._collect_returned()
            fitting = [block for block in self._unused if block.nbytes >= nbytes]
            if not fitting:
                return None
            best = min(fitting, key=lambda block: block.nbytes)
            self._unused = [block for block in self._unused if block is not best]
            return best

    def _collect_returned(self) -> None:
        """Adds returned blocks; frees the oldest ones above the limit."""
        while self._returned:
            self._unused.append(self._returned.popleft())
        while self._unused and sum(block.nbytes for block in self._unused) > self._keep_bytes:
            self._unused.pop(0)


class SharedBlock:
    """One anonymous file; `number` identifies it in the child process."""

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


class BlockLease:
    """Exclusive use of a shared block until the lease and all its tensors are dropped."""

    def __init__(self, block: SharedBlock, give_back: Callable[[SharedBlock], None]) -> None:
        self.block = block
        weakref.finalize(self, give_back, block).atexit = False

    def tensor(self) -> torch.Tensor:
        """The whole block as flat uint8."""
        import torch

        if self.block.mapping is None:
            self.block.mapping = map_file(self.block.descriptor, self.block.nbytes)
        array: Any = self.block.mapping.numpy()[:]
        # The finalizer's reference keeps the lease alive as long as a view of the array exists.
        weakref.finalize(array, _clear, [self]).atexit = False
        return torch.from_numpy(array)


def _clear(leases: list[BlockLease]) -> None:
    leases.clear()


class SharedBlockPool:
    """All shared blocks of one receiver; at most `keep_bytes` of unused ones are kept.

    `on_free(numbers)` is called for blocks that were freed, so that children unmap them.
    """

    def __init__(
        self,
        keep_bytes: int,
        on_free: Callable[[tuple[int, ...]], None],
        free: Callable[[], int] = free_bytes,
    ) -> None:
        self._keep_bytes = keep_bytes
        self._on_free = on_free
        self._free = free
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._unused: list[SharedBlock] = []
        # Lock-free: finalizers fill it, and may run anywhere, also while the lock is held.
        self._returned: deque[SharedBlock] = deque()

    def take(self, nbytes: int) -> BlockLease:
        """Leases a block of at least `nbytes`. Raises GroupError if less memory is free."""
        size = max(nbytes, 1)
        block = self._take_unused(size)
        if block is None:
            free = self._free()
            if nbytes > free and self.kept_bytes():
                self.trim(keep_bytes=0)  # the announced tensors matter more than a future receive
                free = self._free()
            if nbytes > free:
                raise out_of_memory_error(nbytes, free)
            try:
                block = SharedBlock(next(self._numbers), size)
            except OSError as error:
                raise GroupError(f"no memory for the announced tensors: {error}") from None
        return BlockLease(block, self._returned.append)

    def kept_bytes(self) -> int:
        self.trim()
        with self._lock:
            return sum(block.nbytes for block in self._unused)

    def trim(self, keep_bytes: int | None = None) -> None:
        """Collects returned blocks; frees the oldest ones above `keep_bytes`."""
        limit = self._keep_bytes if keep_bytes is None else keep_bytes
        freed: list[SharedBlock] = []
        with self._lock:
            while self._returned:
                self._unused.append(self._returned.popleft())
            while sum(block.nbytes for block in self._unused) > limit:
                freed.append(self._unused.pop(0))
        for block in freed:
            block.free()
        if freed:
            self._on_free(tuple(block.number for block in freed))

    def _take_unused(self, nbytes: int) -> SharedBlock | None:
        self.trim()
        with self._lock:
            fitting = [block for block in self._unused if block.nbytes >= nbytes]
            if not fitting:
                return None
            best = min(fitting, key=lambda block: block.nbytes)
            self._unused.remove(best)
            return best
