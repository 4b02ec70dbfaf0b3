"""Reads files into memory on several threads, with a single copy.

Files are read, not mapped: a file that is truncated meanwhile is an error here, while a mapping
would end the process. Memory uses huge pages, because faulting small ones costs more than the copy.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

# The work item of one thread: whole huge pages, and small enough to balance the threads.
SHARE_BYTES: Final = 8 << 20
# Alignment of tensors in a buffer.
ALIGNMENT_BYTES: Final = 64

# The largest buffer that is kept for the next read: allocating it again costs more than a copy.
KEEP_BYTES: Final = 1 << 30

# A file descriptor, the offset in the file, and the memory to read into.
FilePiece = tuple[int, int, memoryview]


class TruncatedFile(Exception):
    """A file had fewer bytes than its header promised."""


def allocate_read_buffer(nbytes: int) -> Tensor:
    """Flat uint8 memory that was never touched."""
    pages: Any = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a system without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))[:nbytes]


class ReadBufferPool:
    """Keeps the buffer of the last read while it is unused. Safe from any thread."""

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._kept: deque[Tensor] = deque()

    def take(self, nbytes: int) -> tuple[Tensor, Callable[[], None]]:
        """Flat uint8 memory (content undefined), and the function that returns it to the pool."""
        try:
            block = self._kept.pop()
        except IndexError:
            block = None
        if block is None or block.nbytes < nbytes:
            block = allocate_read_buffer(nbytes)
        given: Tensor = block
        return given[:nbytes], lambda: self._back(given)

    def _back(self, block: Tensor) -> None:
        self._kept.clear()
        if block.nbytes <= self._keep_bytes:
            self._kept.append(block)


def tensor_memory(tensor: Tensor) -> memoryview:
    """The tensor's memory, to be read into."""
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data


def split_piece(piece: FilePiece, upto: int) -> tuple[FilePiece, FilePiece]:
    """The piece's parts before and after byte `upto` of its file; either may be empty."""
    descriptor, place, into = piece
    count = min(max(upto - place, 0), len(into))
    return (descriptor, place, into[:count]), (descriptor, place + count, into[count:])


def read_pieces(pieces: Iterable[FilePiece], threads: int) -> None:
    """Read every piece. Raises OSError, TruncatedFile."""
    shares = [share for piece in pieces for share in _shares(*piece)]
    threads = min(threads, max(len(shares), 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-read") as pool:
        for _ in pool.map(_read, shares):
            pass


def _shares(descriptor: int, place: int, into: memoryview) -> Iterator[FilePiece]:
    for start in range(0, len(into), SHARE_BYTES):
        yield descriptor, place + start, into[start : start + SHARE_BYTES]


def _read(piece: FilePiece) -> None:
    descriptor, place, into = piece
    while into:
        count = os.preadv(descriptor, [into], place)
        if not count:
            raise TruncatedFile
        place, into = place + count, into[count:]
