"""Folders in shared memory whose program was killed, given back by the next one that starts.

Whoever uses such a folder holds a lock on it, which ends with it however it ends, and a link in it
says which store it belongs to. Invariant: what is in use is never touched, nor what only lies in
memory while its store is still there: that store's next program finds it again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from omni_proxy.weights.store import places
from omni_proxy.weights.store.record import RECORD

OF: Final = ".of"  # the link to the store on the disk
_VERSION: Final = re.compile(r"v[1-9]\d*")
_log = logging.getLogger(__name__)


def claim(memory: Path, disk: Path) -> int | None:
    """A descriptor that keeps it from being swept while it is open. Raises OSError.

    None where somebody else has it just now: it is used without then.
    """
    descriptor = _locked(memory)
    if descriptor is not None:
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
    prefix = places.memory_prefix()
    found = sorted(places.SHARED_MEMORY.glob(f"{prefix}*"))
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
    """Whether its store is gone, or has all of it on the disk, too."""
    link = folder / OF
    if not link.is_symlink():
        return False  # nobody can say whose it is
    disk = link.readlink()
    whole = [each for each in folder.iterdir() if _VERSION.fullmatch(each.name)]
    return not disk.is_dir() or all((disk / each.name / RECORD).is_file() for each in whole)


def _locked(folder: Path) -> int | None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    os.close(descriptor)
    return None
