"""A file that bytes are received straight into: where each bucket lies, and that it fits."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.process_group.buffers import free_bytes, no_room
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan

if TYPE_CHECKING:
    import torch

BLOCK_BYTES: Final = 512  # what stat counts in, whatever the file system does
MOUNTS: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class FileRegion:
    """An existing file of full size; bucket i's block begins at byte `starts[i]`.

    Inside a block tensors lie as its plan says: without gaps where that was made `dense`.
    """

    path: str
    starts: tuple[int, ...]


def span(place: FileRegion, plans: Sequence[TensorPlan]) -> tuple[int, int]:
    """From which byte on and up to where the buckets lie; raises GroupError where two overlap."""
    if len(place.starts) != len(plans):
        raise GroupError(f"{len(place.starts)} places for {len(plans)} buckets in {place.path}")
    end = 0
    for start, size in sorted(zip(place.starts, (p.block_bytes for p in plans), strict=True)):
        if start < end:
            raise GroupError(f"two buckets would share byte {start} of {place.path}")
        end = start + size
    return min(place.starts), end


def opened(place: FileRegion, plans: Sequence[TensorPlan]) -> int:
    """A descriptor of the file, with room behind the buckets' bytes; the caller closes it.

    Raises GroupError where a bucket does not fit into it, or the disk is too full for it.
    """
    start, end = span(place, plans)
    try:
        descriptor = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise GroupError(f"{place.path} cannot be received into: {error.strerror}") from None
    try:
        # Writing through a mapping to a disk that is full ends the process.
        if not _all_there(place.path, descriptor, end) and end > start:
            os.posix_fallocate(descriptor, start, end - start)
    except OSError as error:
        os.close(descriptor)
        raise _no_disk(place.path, end - start, error) from None
    except GroupError:
        os.close(descriptor)
        raise
    return descriptor


def _all_there(path: str, descriptor: int, end: int) -> bool:
    """Whether none of its pages is still to be found; raises GroupError where they could not be."""
    there = os.fstat(descriptor)
    if end > there.st_size:
        raise GroupError(
            f"{path} has {there.st_size} bytes, and the buckets end at byte {end}: it must be of "
            "full size"
        )
    if not in_memory(there.st_dev):
        return False  # its blocks may be something else's, of the file system itself
    missing = there.st_size - there.st_blocks * BLOCK_BYTES
    if missing > (free := free_bytes()):
        raise no_room(missing, free)
    return missing <= 0


def in_memory(device: int) -> bool:
    """Whether a file system is one whose files are memory, which no call of its own refuses."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in MOUNTS.read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0] in ("tmpfs", "ramfs")
    return False


def _no_disk(path: str, size: int, error: OSError) -> GroupError:
    folder = Path(path).parent
    room = os.statvfs(folder)
    free_bytes = room.f_bavail * room.f_frsize
    return GroupError(
        f"the announced tensors need {size} bytes of {path}, and {folder} has room for "
        f"{free_bytes} more ({error.strerror}): free some, or keep fewer versions"
    )


def mapped(descriptor: int, size: int) -> torch.Tensor:
    """The file's bytes as a flat uint8 tensor; the mapping lives as long as a view of it."""
    import numpy as np
    import torch

    pages: Any = mmap.mmap(descriptor, size)
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))


def mapped_to_read(path: str, end: int) -> torch.Tensor:
    """A file's bytes up to `end` as a flat uint8 tensor; what is written there stays here.

    Raises GroupError where the file cannot be read or is shorter.
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
            pages: Any = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise GroupError(f"{path} cannot be read: {error.strerror}") from None
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))


# Pages of a mapping, taken from the system before bytes come: a first touch outweighs a copy.
#
# Touching never changes what is in them, so it may go on while others write there.

if TYPE_CHECKING:
    import torch

# Linux 5.14; the mmap module has no names for them.
MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
STEP_BYTES: Final = 64 << 20
PAGE_BYTES: Final = 4096
# More is touched while the first bytes come: who waits to hear "ready" has a deadline.
AT_ONCE_BYTES: Final = 1 << 30


def touch(block: torch.Tensor, start: int, stop: int, at_once: int = AT_ONCE_BYTES) -> None:
    """Takes these bytes' pages: so many of them now, the rest in a thread; on old systems none."""
    _touch(block, (start, stop), at_once, MADV_POPULATE_WRITE)


def map_ahead(block: torch.Tensor, start: int, stop: int) -> None:
    """The same of a file in memory whose pages are all there, and only not mapped.

    Mapped as if to be read, many at a time, which takes half as long; in memory whoever may
    write there may do so at once. It outruns any wire, so only the first of them are waited for.
    """
    _touch(block, (start, stop), STEP_BYTES, MADV_POPULATE_READ)


def _touch(block: torch.Tensor, span: tuple[int, int], at_once: int, advice: int) -> None:
    start, stop = span
    first = min(stop, start + at_once)
    if _populated(block, start, first, advice) and stop > first:
        _start(block, first, stop, advice)


def read_ahead(block: torch.Tensor, start: int, stop: int) -> None:
    """Has a thread fetch these bytes of a file, ahead of whoever reads them; returns at once."""
    _start(block, start, stop, MADV_POPULATE_READ)


def _start(block: torch.Tensor, start: int, stop: int, advice: int) -> None:
    arguments = (block, start, stop, advice)
    threading.Thread(target=_populated, args=arguments, name="weights-pages", daemon=True).start()


def _populated(block: torch.Tensor, start: int, stop: int, advice: int) -> bool:
    base = block.data_ptr()
    for step in range(start, stop, STEP_BYTES):
        first = (base + step) & -PAGE_BYTES
        size = base + min(step + STEP_BYTES, stop) - first
        # Through ctypes, which lets other threads run meanwhile.
        if _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice):
            return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
