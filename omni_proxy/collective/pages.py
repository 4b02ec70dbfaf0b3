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
    """Takes these bytes' pages: so many of them now, the rest in a thread; on old systems none."""
    _touch(block, (start, stop), at_once, MADV_POPULATE_WRITE)


def map_ahead(block: torch.Tensor, start: int, stop: int) -> None:
    """The same of a file in memory whose pages are all there, and only not mapped.

    Mapped as if to be read, many at a time, which takes half as long; in memory whoever may
    write there may do so at once. It outruns any wire, so only the first of them are waited for.
    """
    _touch(block, (start, stop), STEP_BYTES, MADV_POPULATE_READ)


def _touch(block: torch.Tensor, span: tuple[int, int], at_once: int, advice: int) -> None:
    start, stop = span
    first = min(stop, start + at_once)
    if _populated(block, start, first, advice) and stop > first:
        _start(block, first, stop, advice)


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
