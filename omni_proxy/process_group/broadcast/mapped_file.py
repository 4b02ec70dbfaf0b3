"""Files mapped as tensors: location of buckets, size checks, prefaulted pages.

Invariant: a file is mapped for writing only after all blocks under the buckets are allocated,
because a write through a mapping to a full disk would end the process (SIGBUS). Prefaulting never
changes the content of pages, so it may continue while other threads write to them. Linux only;
torch is imported only by functions that return tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan
from omni_proxy.system.memory import free_bytes, is_memory_device

if TYPE_CHECKING:
    import torch


def out_of_memory_error(needed: int, free: int) -> GroupError:
    return GroupError(
        f"the announced tensors need {needed} bytes, but only {max(free, 0)} bytes of memory are "
        "free: send them in smaller buckets"
    )


PAGE_BYTES: Final = 4096
STAT_BLOCK_BYTES: Final = 512  # the unit of st_blocks on every file system
# Linux 5.14; the mmap module has no names for them.
MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
STEP_BYTES: Final = 64 << 20
# More is prefaulted while the first bytes arrive, because the caller has a deadline to be ready.
BEFORE_READY_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class FileRegion:
    """An existing file of full size; bucket i's block begins at byte `starts[i]`.

    Inside a block, tensors are at the offsets of the bucket's plan: without gaps if it is `dense`.
    """

    path: str
    starts: tuple[int, ...]


def region_span(region: FileRegion, plans: Sequence[TensorPlan]) -> tuple[int, int]:
    """First and end byte of all buckets; raises GroupError if two overlap."""
    if len(region.starts) != len(plans):
        raise GroupError(f"{len(region.starts)} starts for {len(plans)} buckets in {region.path}")
    end = 0
    for start, size in sorted(zip(region.starts, (p.block_bytes for p in plans), strict=True)):
        if start < end:
            raise GroupError(f"two buckets would share byte {start} of {region.path}")
        end = start + size
    return min(region.starts), end


def map_for_receive(
    region: FileRegion, plans: Sequence[TensorPlan]
) -> Callable[[TensorPlan], torch.Tensor]:
    """Returns a function that maps the file; it raises GroupError if that fails."""

    def map_region(_: TensorPlan) -> torch.Tensor:
        descriptor = open_for_receive(region, plans)
        try:
            status = os.fstat(descriptor)
            mapping = map_file(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        if is_memory_device(status.st_dev):
            map_resident_pages(mapping, *region_span(region, plans))
        else:
            prefault(mapping, *region_span(region, plans), first_bytes=STEP_BYTES)
        return mapping

    return map_region


def open_for_receive(region: FileRegion, plans: Sequence[TensorPlan]) -> int:
    """Opens the file and allocates its blocks; the caller closes the descriptor.

    Raises GroupError if a bucket is outside the file, or the disk is too full.
    """
    start, end = region_span(region, plans)
    try:
        descriptor = os.open(region.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise GroupError(f"{region.path} cannot be received into: {error.strerror}") from None
    try:
        # A write through a mapping to a full disk would end the process.
        if not _is_resident(region.path, descriptor, end) and end > start:
            os.posix_fallocate(descriptor, start, end - start)
    except OSError as error:
        os.close(descriptor)
        raise _disk_full_error(region.path, end - start, error) from None
    except GroupError:
        os.close(descriptor)
        raise
    return descriptor


def _is_resident(path: str, descriptor: int, end: int) -> bool:
    """Whether the file is in memory with all its pages allocated.

    Raises GroupError if the file is too short, or too little memory is free for missing pages.
    """
    status = os.fstat(descriptor)
    if end > status.st_size:
        raise GroupError(
            f"{path} has {status.st_size} bytes, and the buckets end at byte {end}: it must be of "
            "full size"
        )
    if not is_memory_device(status.st_dev):
        return False  # st_blocks may also count the file system's own metadata
    missing = status.st_size - status.st_blocks * STAT_BLOCK_BYTES
    if missing > (free := free_bytes()):
        raise out_of_memory_error(missing, free)
    return missing <= 0


def _disk_full_error(path: str, size: int, error: OSError) -> GroupError:
    folder = Path(path).parent
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    return GroupError(
        f"the announced tensors need {size} bytes of {path}, and {folder} has room for "
        f"{free} more ({error.strerror}): free some, or keep fewer versions"
    )


def map_file(descriptor: int, size: int) -> torch.Tensor:
    """The file's bytes as a flat uint8 tensor; the mapping exists as long as a view of it."""
    import numpy as np
    import torch

    mapping: Any = mmap.mmap(descriptor, size)
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))


def map_file_to_read(path: str, end: int) -> torch.Tensor:
    """A file's bytes up to `end` as a flat uint8 tensor; writes to it don't change the file.

    Raises GroupError if the file can't be read or is shorter.
    """
    import numpy as np
    import torch

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if end > size:
                raise GroupError(f"{path} has {size} bytes, and the buckets end at byte {end}")
            if not end:
                return torch.empty(0, dtype=torch.uint8)
            mapping: Any = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise GroupError(f"{path} cannot be read: {error.strerror}") from None
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))


def prefault(
    block: torch.Tensor, start: int, stop: int, first_bytes: int = BEFORE_READY_BYTES
) -> None:
    """Allocates the pages of bytes `start` to `stop`: `first_bytes` now, the rest in a thread.

    Does nothing on kernels without MADV_POPULATE_WRITE.
    """
    _populate_from(block, start, stop, first_bytes, MADV_POPULATE_WRITE)


def map_resident_pages(block: torch.Tensor, start: int, stop: int) -> None:
    """Like `prefault`, for a file in memory whose pages are allocated but not mapped.

    Read faults map many pages at a time, and writes to tmpfs pages need no second fault. This is
    faster than any network, so it waits only for the first step.
    """
    _populate_from(block, start, stop, STEP_BYTES, MADV_POPULATE_READ)


def read_ahead(block: torch.Tensor, start: int, stop: int) -> None:
    """Reads these bytes of a mapped file into the page cache, in a thread, without waiting."""
    _start_populating(block, start, stop, MADV_POPULATE_READ)


def _populate_from(
    block: torch.Tensor, start: int, stop: int, first_bytes: int, advice: int
) -> None:
    first_stop = min(stop, start + first_bytes)
    if _populate(block, start, first_stop, advice) and stop > first_stop:
        _start_populating(block, first_stop, stop, advice)


def _start_populating(block: torch.Tensor, start: int, stop: int, advice: int) -> None:
    arguments = (block, start, stop, advice)
    threading.Thread(target=_populate, args=arguments, name="weights-pages", daemon=True).start()


def _populate(block: torch.Tensor, start: int, stop: int, advice: int) -> bool:
    """Populates the pages. Returns whether the kernel supports the advice."""
    base = block.data_ptr()
    for step in range(start, stop, STEP_BYTES):
        first = (base + step) & -PAGE_BYTES
        size = base + min(step + STEP_BYTES, stop) - first
        # ctypes releases the GIL during the call.
        if _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice):
            return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
