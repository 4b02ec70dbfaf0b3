"""Pages of a mapping, taken from the system before bytes come: a first touch outweighs a copy.

Touching never changes what is in them, so it may go on while others write there.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

# Linux 5.14; the mmap module has no names for them.
MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
STEP_BYTES: Final = 64 << 20
PAGE_BYTES: Final = 4096
# More is touched while the first bytes come: who waits to hear "ready" has a deadline.
AT_ONCE_BYTES: Final = 1 << 30


def touch(block: torch.Tensor, start: int, stop: int, at_once: int = AT_ONCE_BYTES) -> None:
    """Takes these bytes' pages: so many of them now, the rest in a thread; on old systems none.

    Pages that are there already, and only not mapped, are taken faster than a wire brings bytes.
    """
    first = min(stop, start + at_once)
    if _populated(block, start, first, MADV_POPULATE_WRITE) and stop > first:
        _start(block, first, stop, MADV_POPULATE_WRITE)


def read_ahead(block: torch.Tensor, start: int, stop: int) -> None:
    """Has a thread fetch these bytes of a file, ahead of whoever reads them; returns at once."""
    _start(block, start, stop, MADV_POPULATE_READ)


def _start(block: torch.Tensor, start: int, stop: int, advice: int) -> None:
    arguments = (block, start, stop, advice)
    threading.Thread(target=_populated, args=arguments, name="weights-pages", daemon=True).start()


def _populated(block: torch.Tensor, start: int, stop: int, advice: int) -> bool:
    base = block.data_ptr()
    for step in range(start, stop, STEP_BYTES):
        first = (base + step) & -PAGE_BYTES
        size = base + min(step + STEP_BYTES, stop) - first
        # Through ctypes, which lets other threads run meanwhile.
        if _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice):
            return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
