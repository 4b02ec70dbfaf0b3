"""Folders on file systems: what is free there, and writes that are whole or not there at all.

Every function blocks. Invariant: what `put` and `move` did is on the disk when they return.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from omni_proxy.process_group.memory import free_bytes, is_memory_device

SHARED_MEMORY: Final = Path("/dev/shm")
_PIECE_BYTES: Final = 8 << 20
# What is not on the disk yet is what others' small writes wait for (0.15 s behind half a GB).
_PENDING_BYTES: Final = 64 << 20
_NAME_DIGITS: Final = 16


class StoreBusy(OSError):
    """Another program keeps its versions in this folder."""


def room_on(folder: Path) -> int:
    """Bytes that can be written below `folder` now, by the machine's memory where it lies there."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    return min(free, free_bytes()) if in_memory(folder) else free


def in_memory(folder: Path) -> bool:
    """Whether the folder is on tmpfs or ramfs."""
    return is_memory_device(folder.stat().st_dev)


def memory_for(disk: Path) -> Path | None:
    """A folder of ours in shared memory that belongs to this one; None where there can be none.

    Raises OSError.
    """
    if not SHARED_MEMORY.is_dir() or in_memory(disk):
        return None
    place = hashlib.sha256(os.fsencode(disk.resolve())).hexdigest()[:_NAME_DIGITS]
    folder = SHARED_MEMORY / f"{memory_prefix()}{place}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # Everybody may write there: what somebody else has put under our name is not ours.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def memory_prefix() -> str:
    """How the names of all our folders there begin."""
    return f"omni-proxy-{os.getuid()}-"


def lock(folder: Path) -> int:
    """A descriptor that keeps other programs out while it is open; raises StoreBusy."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreBusy(f"{folder} is in use by another omni-proxy") from None
    return descriptor


def put(path: Path, data: bytes) -> None:
    """Replace a file by one with these bytes. Raises OSError; the old one is whole then."""
    aside = path.with_name(f"{path.name}.new")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


def allot(path: Path, header: bytes, nbytes: int) -> None:
    """A file of `nbytes` that begins with `header`; all its room is taken. Raises OSError."""
    with path.open("xb") as file:
        # Else whoever writes through a mapping later is killed where the room has gone.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        file.write(header)


def copy(source: Path, target: Path) -> None:
    """The bytes of a file, on the disk when it returns, without passing through this process."""
    with source.open("rb") as read, target.open("xb") as write:
        left = os.fstat(read.fileno()).st_size
        pending = 0
        while left:
            count = os.sendfile(write.fileno(), read.fileno(), None, min(left, _PIECE_BYTES))
            if not count:
                raise OSError(f"{source} ended {left} bytes too soon")
            left -= count
            pending += count
            if pending >= _PENDING_BYTES:
                os.fdatasync(write.fileno())
                pending = 0
        os.fsync(write.fileno())


def settle(folder: Path) -> None:
    """Have the bytes of its files on the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def move(source: Path, target: Path) -> None:
    """Rename a folder, and have the name on the disk."""
    source.rename(target)
    sync(target.parent)


def remove(folder: Path) -> None:
    """Whole or not at all, as far as its name tells."""
    doomed = folder.with_name(f"{folder.name}.removed")
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """A symbolic link, replaced in one step."""
    aside = link.with_name(f"{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)
    sync(link.parent)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
