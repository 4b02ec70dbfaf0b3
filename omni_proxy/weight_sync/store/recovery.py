"""What is found in a store's folder when the program starts.

Invariant: only folders of our own names are looked at or removed. A version is taken as whole where
its record says so and each file has the size and the header that the record promises; that its
bytes are still the same is for whoever hashes them.
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
from omni_proxy.weight_sync.store.manifest import RECORD, Manifest, UnreadableManifest, decode
from omni_proxy.weight_sync.store.safetensors_header import (
    LENGTH,
    MAX_HEADER_BYTES,
    HeaderRow,
    SafetensorsError,
    rows_in,
)

_WHOLE = re.compile(r"v([1-9]\d*)")
_REST = re.compile(r"v[1-9]\d*\.(partial|removed|damaged|partial\.removed|damaged\.removed)")
_log = logging.getLogger(__name__)


def found_in(root: Path) -> dict[int, Manifest]:
    """Whole versions by number; what was left half-way is removed. Raises OSError."""
    found: dict[int, Manifest] = {}
    for folder in sorted(root.iterdir()):
        if _REST.fullmatch(folder.name):
            _log.info("removing %s, which was left half-way", folder)
            filesystem.remove(folder)
        elif named := _WHOLE.fullmatch(folder.name):
            try:
                found[int(named[1])] = _judged(folder, int(named[1]))
            except (SafetensorsError, UnreadableManifest, OSError) as error:
                set_aside(folder, str(error))
    return found


def set_aside(folder: Path, why: str) -> None:
    """It stays for whoever wants to look, until the next start."""
    _log.error("%s is damaged and no version any more: %s", folder, why)
    aside = folder.with_name(f"{folder.name}.damaged")
    filesystem.remove(aside)
    filesystem.move(folder, aside)


def _judged(folder: Path, number: int) -> Manifest:
    """Raises SafetensorsError, UnreadableManifest, OSError."""
    record = decode((folder / RECORD).read_bytes())
    if record.number != number or not record.complete:
        raise UnreadableManifest(f"its record is that of version {record.number}, or not complete")
    rows: dict[str, HeaderRow] = {}
    for name, nbytes in record.files.items():
        rows |= rows_of(folder / name, nbytes)
    for name, row in record.tensors.items():
        if rows.get(name) != replace(row, sha256=""):
            raise SafetensorsError(f"tensor {name!r} is not where its record says")
    return record


def rows_of(path: Path, nbytes: int) -> dict[str, HeaderRow]:
    """The tensors of a file that has to be so long, in their order. Raises SafetensorsError, OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH.size)
        (length,) = LENGTH.unpack(start) if len(start) == LENGTH.size else (0,)
        if size != nbytes or not 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH.size):
            raise SafetensorsError(f"{path.name} has {size} bytes, and its record says {nbytes}")
        return rows_in(path.name, file.read(length))


# Digests of the tensors in a version's files, read piece by piece.
#
# Invariant: files are read, never mapped: one that is cut short is an error, not the program's end.

THREADS: Final = 2
PIECE_BYTES: Final = 1 << 20


def digests_in(folder: Path, rows: Mapping[str, HeaderRow]) -> dict[str, str]:
    """SHA-256 by tensor name, as replicas tell it. Raises OSError."""
    # The longest first: else one thread ends with the embedding while the other has nothing left.
    order = sorted(rows, key=lambda name: rows[name].nbytes, reverse=True)
    files: dict[str, int] = {}
    with ExitStack() as opened:
        for file in {row.file for row in rows.values()}:
            files[file] = os.open(folder / file, os.O_RDONLY)
            opened.callback(os.close, files[file])
        with ThreadPoolExecutor(THREADS, thread_name_prefix="weights-digest") as pool:
            found = pool.map(lambda n: _digest(n, rows[n], files[rows[n].file]), order)
            return dict(zip(order, found, strict=True))


def _digest(name: str, row: HeaderRow, descriptor: int) -> str:
    digest = start_tensor_digest(TensorSpec(name, row.dtype, row.shape, row.nbytes))
    piece = memoryview(bytearray(min(PIECE_BYTES, max(row.nbytes, 1))))
    done = 0
    while done < row.nbytes:
        count = os.preadv(descriptor, [piece[: row.nbytes - done]], row.offset + done)
        if not count:
            raise OSError(f"{row.file} ended in the middle of {name!r}")
        digest.update(piece[:count])
        done += count
    return digest.hexdigest()
