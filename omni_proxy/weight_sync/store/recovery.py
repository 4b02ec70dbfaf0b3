"""Checks of stored versions: headers and sizes at the start, digests of all bytes on request.

Invariant: only folders with this store's names are read or removed. At the start a version is
accepted if its manifest is complete and each file has the recorded size and header; whether its
bytes are unchanged is what `compute_digests` is for. Files are read, never mapped: a truncated
file is an error, not the program's end.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from omni_proxy.process_group.broadcast.tensor_hashing import start_tensor_digest
from omni_proxy.process_group.tensor_plan import TensorSpec
from omni_proxy.weight_sync.store import filesystem
from omni_proxy.weight_sync.store.manifest import (
    MANIFEST_FILE,
    Manifest,
    UnreadableManifest,
    decode,
)
from omni_proxy.weight_sync.store.safetensors_header import (
    LENGTH,
    MAX_HEADER_BYTES,
    HeaderRow,
    SafetensorsError,
    parse_header,
)

_VERSION = re.compile(r"v([1-9]\d*)")
_INCOMPLETE = re.compile(r"v[1-9]\d*\.(partial|removed|damaged|partial\.removed|damaged\.removed)")
HASH_THREADS: Final = 2
READ_BYTES: Final = 1 << 20
_log = logging.getLogger(__name__)


def recover_versions(root: Path) -> dict[int, Manifest]:
    """Complete versions by number; removes incomplete ones. Raises OSError."""
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
    """Renames a damaged version's folder, which is kept for inspection until the next start."""
    _log.error("stored_version_damaged folder=%s reason=%r", folder, reason)
    aside = folder.with_name(f"{folder.name}.damaged")
    filesystem.remove(aside)
    filesystem.move(folder, aside)


def _read_version(folder: Path, number: int) -> Manifest:
    """Raises SafetensorsError, UnreadableManifest, OSError."""
    manifest = decode((folder / MANIFEST_FILE).read_bytes())
    if manifest.number != number or not manifest.complete:
        raise UnreadableManifest(
            f"its record is that of version {manifest.number}, or not complete"
        )
    rows: dict[str, HeaderRow] = {}
    for name, nbytes in manifest.files.items():
        rows |= read_header_rows(folder / name, nbytes)
    for name, row in manifest.tensors.items():
        if rows.get(name) != replace(row, sha256=""):
            raise SafetensorsError(f"tensor {name!r} is not where its record says")
    return manifest


def read_header_rows(path: Path, nbytes: int) -> dict[str, HeaderRow]:
    """The tensors of a file that must have `nbytes`, in order. Raises SafetensorsError, OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(LENGTH.size)
        (length,) = LENGTH.unpack(prefix) if len(prefix) == LENGTH.size else (0,)
        if size != nbytes or not 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH.size):
            raise SafetensorsError(f"{path.name} has {size} bytes, and its record says {nbytes}")
        return parse_header(path.name, file.read(length))


def compute_digests(folder: Path, rows: Mapping[str, HeaderRow]) -> dict[str, str]:
    """SHA-256 by tensor name, in the form that replicas report. Raises OSError."""
    # The largest first, so that both threads finish at about the same time.
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
