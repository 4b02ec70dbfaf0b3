"""The folder of a running program's own sockets; those that killed programs left are removed.

Invariant: whoever uses such a folder holds a lock on it, which ends with the program however it
ends; what is locked, or younger than its lock may be, is never touched.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "omni-proxy-front-"
YOUNG_SECS: Final = 60.0  # it may have been made just now, by a program that locks it next
PARENT_BYTES: Final = 60  # of the 107 that the path of a Unix socket may have
INSTEAD: Final = ("/tmp", "/dev/shm")
_log = logging.getLogger(__name__)


@contextmanager
def private_runtime_dir() -> Iterator[Path]:
    """A new one that nobody else can read, removed at the end. Raises OSError."""
    parent = _parent()
    _sweep(parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as made:
        lock = _opened(Path(made))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(made)
        finally:
            os.close(lock)


def _parent() -> Path:
    """Where temporary things go, unless a socket's path would be too long there."""
    for parent in (tempfile.gettempdir(), *INSTEAD):
        if len(os.fsencode(parent)) <= PARENT_BYTES and os.access(parent, os.W_OK):
            return Path(parent)
    return Path(tempfile.gettempdir())  # whoever binds says what is wrong


def _sweep(parent: Path) -> None:
    old = time.time() - YOUNG_SECS
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another's, in use, or gone by now: none of our business
            about = folder.lstat()
            if about.st_uid == os.getuid() and about.st_mtime < old:
                _remove(folder)


def _remove(folder: Path) -> None:
    lock = _opened(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
        _log.info("removed %s, which a killed program left", folder)
    finally:
        os.close(lock)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
