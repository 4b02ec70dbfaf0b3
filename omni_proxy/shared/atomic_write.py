"""Atomic and durable writes of files.

Invariant: a reader gets either the old content or the new one, never a part, and after a crash,
too: the content is synced before the rename, and the folder after it. Blocking.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes, temporary: Path, mode: int = 0o666) -> None:
    """Write `temporary`, in the same folder and with no other writer, and rename it to `path`.

    `mode`: of a new file, without the bits of the umask. Raises OSError; `temporary` is then
    removed, and the old file unchanged, unless only the sync of the folder failed: then the new
    content is in place, but may not survive a crash.
    """
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
