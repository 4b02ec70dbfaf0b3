"""Digests of the tensors in a version's files, read piece by piece.

Invariant: files are read, never mapped: one that is cut short is an error, not the program's end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from omni_proxy.process_group.tensor_hashing import begun
from omni_proxy.process_group.tensor_plan import TensorSpec
from omni_proxy.weight_sync.store.safetensors_header import HeaderRow

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
    digest = begun(TensorSpec(name, row.dtype, row.shape, row.nbytes))
    piece = memoryview(bytearray(min(PIECE_BYTES, max(row.nbytes, 1))))
    done = 0
    while done < row.nbytes:
        count = os.preadv(descriptor, [piece[: row.nbytes - done]], row.offset + done)
        if not count:
            raise OSError(f"{row.file} ended in the middle of {name!r}")
        digest.update(piece[:count])
        done += count
    return digest.hexdigest()
