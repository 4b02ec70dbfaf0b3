"""Folders in shared memory whose program was killed, given back by the next one that starts.

Whoever uses such a folder holds a lock on it, which ends with it however it ends, and a link in it
says which store it belongs to. Invariant: what is in use is never touched, nor what only lies in
memory while its store is still there: that store's next program finds it again. Who has just made
one, and has no lock on it yet, finds it gone and makes it anew.
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
from omni_proxy.weight_sync.store.manifest import RECORD

OF: Final = ".of"  # the link to the store on the disk
# Who sweeps has a folder for as long as it takes to remove what is in it.
SWEEP_SECS: Final = 5.0
AGAIN_SECS: Final = 0.01
_VERSION: Final = re.compile(r"v[1-9]\d*")
_log = logging.getLogger(__name__)


def claim(memory: Path, disk: Path) -> int | None:
    """A descriptor that keeps it from being swept while it is open. Raises OSError.

    None where somebody else has it and does not let go: it is used without then.
    """
    pause, until = threading.Event(), time.monotonic() + SWEEP_SECS
    while (descriptor := _made_and_locked(memory)) is None:
        if time.monotonic() >= until:
            return None
        pause.wait(AGAIN_SECS)
    link = memory / OF
    link.unlink(missing_ok=True)
    link.symlink_to(disk.resolve())
    return descriptor


def give_up(memory: Path) -> None:
    """Nothing is left in it. Raises OSError where something is."""
    (memory / OF).unlink(missing_ok=True)
    memory.rmdir()


def sweep() -> list[Path]:
    """Remove what killed programs left, and nobody needs; what was removed. Blocks."""
    prefix = filesystem.memory_prefix()
    found = sorted(filesystem.SHARED_MEMORY.glob(f"{prefix}*"))
    return [folder for folder in found if _swept(folder)]


def _swept(folder: Path) -> bool:
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return False
        descriptor = _locked(folder)
        if descriptor is None:
            return False
        try:
            if not _needless(folder):
                return False
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("%s, which a killed program left, stays: %s", folder, error)
        return False
    _log.info("removed %s, which a killed program left", folder)
    return True


def _needless(folder: Path) -> bool:
    """Whether it is empty, or its store is gone, or has all of it on the disk, too."""
    link = folder / OF
    if not link.is_symlink():
        # Of one that has something in it nobody can say whose it is.
        return not any(folder.iterdir())
    disk = link.readlink()
    whole = [each for each in folder.iterdir() if _VERSION.fullmatch(each.name)]
    return not disk.is_dir() or all((disk / each.name / RECORD).is_file() for each in whole)


def _made_and_locked(memory: Path) -> int | None:
    memory.mkdir(mode=0o700, exist_ok=True)
    try:
        return _locked(memory)
    except FileNotFoundError:
        return None  # swept between the two


def _locked(folder: Path) -> int | None:
    """None where somebody else has it, or where another one has this name by now."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.lstat()):
            return descriptor
    os.close(descriptor)
    return None
