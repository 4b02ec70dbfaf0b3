"""The runtime directory: a private folder for the sockets of the running program.

Folders of killed programs are removed at the next start. Invariant: a running program has a lock on
its folder, which the kernel releases when the program ends; a folder that is locked, or too young
to be locked yet, is never removed.
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

_log = logging.getLogger(__name__)

PREFIX: Final = "omni-proxy-run-"
OLD_PREFIX: Final = "omni-proxy-front-"  # of versions before; removed with the next release
MIN_STALE_SECS: Final = 60.0  # a younger folder may be one that its program is about to lock
MAX_PARENT_BYTES: Final = 60  # of the 107 that the path of a Unix socket may have
FALLBACK_PARENTS: Final = ("/tmp", "/dev/shm")


@contextmanager
def private_runtime_dir() -> Iterator[Path]:
    """A new folder with mode 0700, removed at the end. Raises OSError."""
    parent = _choose_parent()
    _remove_stale(parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        lock = _open_folder(Path(name))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(lock)


def _choose_parent() -> Path:
    """The service manager's folder for this program (systemd.exec(5), RuntimeDirectory=), which
    commands outside the service can also access; else the folder for temporary files, or another
    one if its path is too long for a socket."""
    managed = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[:1]
    for parent in (*filter(None, managed), tempfile.gettempdir(), *FALLBACK_PARENTS):
        if len(os.fsencode(parent)) <= MAX_PARENT_BYTES and os.access(parent, os.W_OK):
            return Path(parent)
    return Path(tempfile.gettempdir())  # the later bind reports the problem


def _remove_stale(parent: Path) -> None:
    newest = time.time() - MIN_STALE_SECS
    for folder in (*parent.glob(f"{PREFIX}*"), *parent.glob(f"{OLD_PREFIX}*")):
        with suppress(OSError):  # it belongs to another user, is in use, or was removed
            stat = folder.lstat()
            if stat.st_uid == os.getuid() and stat.st_mtime < newest:
                _remove(folder)


def _remove(folder: Path) -> None:
    """Raises OSError if a program has the lock."""
    lock = _open_folder(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
        _log.info("stale_runtime_dir_removed path=%s", folder)
    finally:
        os.close(lock)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
