"""Files that other programs read or replace: whether one has changed, and atomic writes.

Invariant of `write_atomically`: a reader gets either the old content or the new one, never a part.
Blocking: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from omni_proxy.shared.atomic_write import replace_file

_log = logging.getLogger(__name__)

FileSignature = tuple[int, int, int]  # mtime in ns, size in bytes, inode
FileSignatures = tuple[FileSignature | None, ...]


def file_signature(path: str | os.PathLike[str]) -> FileSignature | None:
    """A value that changes if the content may have changed; None while the file can't be reached.

    Links are followed.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def file_signatures(paths: Iterable[str]) -> FileSignatures:
    return tuple(map(file_signature, paths))


def read_regular_file(path: Path) -> bytes:
    """Its content. Raises OSError, and for a FIFO or a device, too, which might never end."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return file.read()


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for a writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def write_atomically(path: Path, text: str) -> None:
    """`atomic_write.replace_file` with a temporary file of this process. Raises OSError.

    The file gets mode 0600; a missing folder is created with mode 0700.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    replace_file(path, text.encode(), temporary, 0o600)


def remove_stale_temporaries(path: Path) -> None:
    """Remove temporary files of `path` whose writer was killed before the rename."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*"):
        pid = temporary.name.rpartition(".")[2]
        if pid.isascii() and pid.isdigit() and not _is_other_process(int(pid)):
            with contextlib.suppress(OSError):
                temporary.unlink()
                _log.info("stale_temporary_removed file=%s", temporary)


def _is_other_process(pid: int) -> bool:
    """Whether another process with this id runs, which may be writing its file."""
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()
