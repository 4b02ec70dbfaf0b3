"""File operations of the store: free space, atomic and durable writes, the store's lock.

Every function blocks. Invariant: changes by `replace_file` and `move` are durable when they return.
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

from omni_proxy.shared import atomic_write
from omni_proxy.shared.atomic_write import sync_folder
from omni_proxy.system.memory import free_bytes, is_memory_device

SHARED_MEMORY: Final = Path("/dev/shm")
_COPY_BYTES: Final = 8 << 20
# Unflushed pages delay small writes of other programs, so flush often.
_MAX_UNFLUSHED_BYTES: Final = 64 << 20
_NAME_DIGITS: Final = 16


class StoreBusy(OSError):
    """Another program has this store open."""


def free_space(folder: Path) -> int:
    """Bytes that can be written below `folder` now; for tmpfs also limited by free memory."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    return min(free, free_bytes()) if is_in_memory(folder) else free


def is_in_memory(folder: Path) -> bool:
    """Whether the folder is on tmpfs or ramfs."""
    return is_memory_device(folder.stat().st_dev)


def shared_memory_folder(disk: Path) -> Path | None:
    """This store's folder in shared memory; None if there is none or `disk` is in memory itself.

    Raises OSError.
    """
    if not SHARED_MEMORY.is_dir() or is_in_memory(disk):
        return None
    digest = hashlib.sha256(os.fsencode(disk.resolve())).hexdigest()[:_NAME_DIGITS]
    folder = SHARED_MEMORY / f"{shared_memory_prefix()}{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    # Any user may write to /dev/shm: don't use a folder of this name that another user created.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def shared_memory_prefix() -> str:
    """The prefix of this user's folder names in shared memory."""
    return f"omni-proxy-{os.getuid()}-"


def lock(folder: Path) -> int:
    """Locks the folder against other programs while the descriptor is open. Raises StoreBusy."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreBusy(f"{folder} is in use by another omni-proxy") from None
    return descriptor


def is_open_as(descriptor: int, path: Path) -> bool:
    """Whether the open file or folder is the one that is now at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file atomically. Raises OSError as `atomic_write.replace_file` does."""
    atomic_write.replace_file(path, data, path.with_name(f"{path.name}.new"))


def allocate(path: Path, header: bytes, nbytes: int) -> None:
    """Creates a file of `nbytes` that starts with `header`, with all blocks allocated.

    Raises OSError.
    """
    with path.open("xb") as file:
        # If the disk became full later, a write through a mapping would kill the writer (SIGBUS).
        os.posix_fallocate(file.fileno(), 0, nbytes)
        file.write(header)


def copy(source: Path, target: Path) -> None:
    """Copies a file durably, inside the kernel."""
    with source.open("rb") as read, target.open("xb") as write:
        remaining = os.fstat(read.fileno()).st_size
        unflushed = 0
        while remaining:
            count = os.sendfile(write.fileno(), read.fileno(), None, min(remaining, _COPY_BYTES))
            if not count:
                raise OSError(f"{source} ended {remaining} bytes too soon")
            remaining -= count
            unflushed += count
            if unflushed >= _MAX_UNFLUSHED_BYTES:
                os.fdatasync(write.fileno())
                unflushed = 0
        os.fsync(write.fileno())


def sync_files(folder: Path) -> None:
    """Flushes the content of the folder's files to the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def move(source: Path, target: Path) -> None:
    """Renames a folder durably."""
    source.rename(target)
    sync_folder(target.parent)


def remove(folder: Path) -> None:
    """Removes a folder; its name disappears atomically, its content later."""
    doomed = folder.with_name(f"{folder.name}.removed")
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def replace_symlink(link: Path, target: Path) -> None:
    """Points a symbolic link at `target`, atomically."""
    temporary = link.with_name(f"{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    sync_folder(link.parent)
