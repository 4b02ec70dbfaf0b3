"""A file that bytes are received straight into: where each bucket lies, and that it fits."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.collective.buffers import free_bytes, no_room
from omni_proxy.collective.specs import GroupError, Plan

if TYPE_CHECKING:
    import torch

BLOCK_BYTES: Final = 512  # what stat counts in, whatever the file system does
MOUNTS: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Place:
    """An existing file of full size; bucket i's block begins at byte `starts[i]`.

    Inside a block tensors lie as its plan says: without gaps where that was made `dense`.
    """

    path: str
    starts: tuple[int, ...]


def span(place: Place, plans: Sequence[Plan]) -> tuple[int, int]:
    """From which byte on and up to where the buckets lie; raises GroupError where two overlap."""
    if len(place.starts) != len(plans):
        raise GroupError(f"{len(place.starts)} places for {len(plans)} buckets in {place.path}")
    end = 0
    for start, size in sorted(zip(place.starts, (p.block_bytes for p in plans), strict=True)):
        if start < end:
            raise GroupError(f"two buckets would share byte {start} of {place.path}")
        end = start + size
    return min(place.starts), end


def opened(place: Place, plans: Sequence[Plan]) -> int:
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
