"""Removes folders in shared memory that a killed program left, when the next program starts.

A program holds a lock on its folder, which the kernel releases however the program ends; a link in
the folder names its store. Invariant: a locked folder is never touched, nor one whose versions
exist only in memory while its store exists: the store's next program recovers them. A program whose
new folder is removed before it could lock it creates the folder again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from omni_proxy.weight_sync.store import filesystem
from omni_proxy.weight_sync.store.manifest import MANIFEST_FILE

STORE_LINK: Final = ".of"  # the link to the store on the disk
# How long another program may hold the lock while it removes a folder's content.
LOCK_SECS: Final = 5.0
RETRY_SECS: Final = 0.01
_VERSION: Final = re.compile(r"v[1-9]\d*")
_log = logging.getLogger(__name__)


def claim(memory: Path, disk: Path) -> int | None:
    """A descriptor that protects the folder from removal while it is open. Raises OSError.

    None if another program keeps the lock: the folder is then used without it.
    """
    pause, deadline = threading.Event(), time.monotonic() + LOCK_SECS
    while (descriptor := _create_and_lock(memory)) is None:
        if time.monotonic() >= deadline:
            return None
        pause.wait(RETRY_SECS)
    link = memory / STORE_LINK
    link.unlink(missing_ok=True)
    link.symlink_to(disk.resolve())
    return descriptor


def remove_empty(memory: Path) -> None:
    """Removes a folder without versions. Raises OSError if it is not empty."""
    (memory / STORE_LINK).unlink(missing_ok=True)
    memory.rmdir()


def remove_stale_folders() -> list[Path]:
    """Removes folders of killed programs that are no longer needed; returns them. Blocks."""
    prefix = filesystem.shared_memory_prefix()
    folders = sorted(filesystem.SHARED_MEMORY.glob(f"{prefix}*"))
    return [folder for folder in folders if _remove_if_stale(folder)]


def _remove_if_stale(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        descriptor = _try_lock(folder)
        if descriptor is None:
            return False
        try:
            if not _is_redundant(folder):
                return False
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("stale_shared_memory_kept folder=%s error=%r", folder, str(error))
        return False
    _log.info("stale_shared_memory_removed folder=%s", folder)
    return True


def _is_redundant(folder: Path) -> bool:
    """Whether it is empty, its store is gone, or its store has all its versions on the disk."""
    link = folder / STORE_LINK
    if not link.is_symlink():
        # Without a link the owner of its content is unknown.
        return not any(folder.iterdir())
    disk = link.readlink()
    versions = [entry for entry in folder.iterdir() if _VERSION.fullmatch(entry.name)]
    return not disk.is_dir() or all(
        (disk / version.name / MANIFEST_FILE).is_file() for version in versions
    )


def _create_and_lock(memory: Path) -> int | None:
    memory.mkdir(mode=0o700, exist_ok=True)
    try:
        return _try_lock(memory)
    except FileNotFoundError:
        return None  # removed by another program between the two calls


def _try_lock(folder: Path) -> int | None:
    """None if another program holds the lock, or the folder was replaced in the meantime."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.lstat()):
            return descriptor
    os.close(descriptor)
    return None
