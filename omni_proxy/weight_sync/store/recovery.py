"""Recovery at the start: checks stored versions, removes stale folders from shared memory.

A version is accepted if its manifest is complete and each file has the recorded size and header;
`compute_digests` reads the bytes later. Files are read, never mapped, so that a truncated file is
an error instead of a SIGBUS. Invariant: only folders with this store's names are read or removed,
never a locked one (the kernel releases the lock however a program ends), nor one whose versions
exist only in memory while its store exists. A program whose new folder is removed before it could
lock it creates the folder again.
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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from omni_proxy.process_group.broadcast.tensor_hashing import start_tensor_digest
from omni_proxy.process_group.tensor_plan import TensorSpec
from omni_proxy.shared.safetensors_format import MAX_HEADER_BYTES
from omni_proxy.weight_sync.store import filesystem
from omni_proxy.weight_sync.store.manifest import (
    LENGTH,
    MANIFEST_FILE,
    HeaderRow,
    Manifest,
    SafetensorsError,
    UnreadableManifest,
    decode,
    parse_header,
)

_VERSION = re.compile(r"v([1-9]\d*)")
_INCOMPLETE = re.compile(r"v[1-9]\d*\.(partial|removed|damaged|partial\.removed|damaged\.removed)")
HASH_THREADS: Final = 2
READ_BYTES: Final = 1 << 20
_log = logging.getLogger(__name__)


def recover_versions(root: Path) -> dict[int, Manifest]:
    """Returns complete versions by number; removes incomplete ones. Raises OSError."""
    versions: dict[int, Manifest] = {}
    for folder in sorted(root.iterdir()):
        if _INCOMPLETE.fullmatch(folder.name):
            _log.info("stored_version_removed folder=%s reason=incomplete", folder)
            filesystem.remove(folder)
        elif match := _VERSION.fullmatch(folder.name):
            try:
                versions[int(match[1])] = _read_version(folder, int(match[1]))
            except (SafetensorsError, UnreadableManifest, OSError) as error:
                set_aside(folder, str(error))
    return versions


def set_aside(folder: Path, reason: str) -> None:
    """Renames the folder of a damaged version; it is kept for inspection until the next start."""
    _log.error("stored_version_damaged folder=%s reason=%s", folder, reason)
    aside = folder.with_name(f"{folder.name}.damaged")
    filesystem.remove(aside)
    filesystem.move(folder, aside)


def _read_version(folder: Path, number: int) -> Manifest:
    """Raises SafetensorsError, UnreadableManifest, OSError."""
    manifest = decode((folder / MANIFEST_FILE).read_bytes())
    if manifest.number != number or not manifest.complete:
        raise UnreadableManifest(f"its record is of version {manifest.number}, or is not complete")
    rows: dict[str, HeaderRow] = {}
    for name, nbytes in manifest.files.items():
        rows |= read_header_rows(folder / name, nbytes)
    for name, row in manifest.tensors.items():
        if rows.get(name) != replace(row, sha256=""):
            raise SafetensorsError(f"tensor {name!r} is not at its recorded offset")
    return manifest


def read_header_rows(path: Path, nbytes: int) -> dict[str, HeaderRow]:
    """Reads the header of a file of `nbytes`. Raises SafetensorsError, OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(LENGTH.size)
        (length,) = LENGTH.unpack(prefix) if len(prefix) == LENGTH.size else (0,)
        if size != nbytes or not 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH.size):
            raise SafetensorsError(f"{path.name} has {size} bytes, and its record has {nbytes}")
        return parse_header(path.name, file.read(length))


def compute_digests(folder: Path, rows: Mapping[str, HeaderRow]) -> dict[str, str]:
    """SHA-256 by tensor name, in the form that replicas report. Raises OSError."""
    # The largest tensors first, so that both threads finish at about the same time.
    names = sorted(rows, key=lambda name: rows[name].nbytes, reverse=True)
    descriptors: dict[str, int] = {}
    with ExitStack() as stack:
        for file in {row.file for row in rows.values()}:
            descriptors[file] = os.open(folder / file, os.O_RDONLY)
            stack.callback(os.close, descriptors[file])
        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="weights-digest") as pool:
            digests = pool.map(
                lambda name: _digest(name, rows[name], descriptors[rows[name].file]), names
            )
            return dict(zip(names, digests, strict=True))


def _digest(name: str, row: HeaderRow, descriptor: int) -> str:
    digest = start_tensor_digest(TensorSpec(name, row.dtype, row.shape, row.nbytes))
    buffer = memoryview(bytearray(min(READ_BYTES, max(row.nbytes, 1))))
    done = 0
    while done < row.nbytes:
        count = os.preadv(descriptor, [buffer[: row.nbytes - done]], row.offset + done)
        if not count:
            raise OSError(f"{row.file} ended in the middle of {name!r}")
        digest.update(buffer[:count])
        done += count
    return digest.hexdigest()


STORE_LINK: Final = ".of"  # the link to the store on the disk
# Longest wait for the lock, which another program has while it removes a folder's content.
LOCK_SECS: Final = 5.0
RETRY_SECS: Final = 0.01


def claim(memory: Path, disk: Path, *, wait: bool = True) -> int | None:
    """Locks the folder against removal while the returned descriptor is open. Raises OSError.

    None if another program keeps the lock; then that program may remove the folder.
    """
    pause, deadline = threading.Event(), time.monotonic() + (LOCK_SECS if wait else 0.0)
    while (descriptor := _create_and_lock(memory)) is None:
        if time.monotonic() >= deadline:
            return None
        pause.wait(RETRY_SECS)
    link = memory / STORE_LINK
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(disk.resolve())
    except OSError:
        os.close(descriptor)  # else no later attempt could get the lock
        raise
    return descriptor


def remove_empty(memory: Path) -> None:
    """Removes a folder without versions. Raises OSError if it is not empty."""
    (memory / STORE_LINK).unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # removed by another program
        memory.rmdir()


def remove_stale_folders() -> list[Path]:
    """Removes redundant folders of programs that were killed; returns them. Blocks."""
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
        _log.warning("stale_shared_memory_kept folder=%s error=%s", folder, str(error))
        return False
    _log.info("stale_shared_memory_removed folder=%s", folder)
    return True


def _is_redundant(folder: Path) -> bool:
    """Whether the folder is empty, its store was deleted, or its versions are all on disk."""
    link = folder / STORE_LINK
    if not link.is_symlink():
        # Without a link the store that its content belongs to is unknown.
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
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if filesystem.is_open_as(descriptor, folder):
            return descriptor
    os.close(descriptor)
    return None
