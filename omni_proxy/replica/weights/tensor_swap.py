"""Writes new values into live tensors, by copy or by swap, on all cores.

A swap needs no memory for a third set of tensors: afterwards the old values are where the new ones
were, so that they can be restored. Both work only on plain tensors in host memory. Invariant: a
failed swap changes nothing, because moved parts are moved back with a buffer that was allocated
before the first move; a failed `copy_tensors` may have written some tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

# The size of the three buffers that a swap moves: together they about fit into a core's cache.
PIECE_BYTES: Final = 1 << 20
# The work item of one thread: small enough to balance the cores, large enough to pay off.
SHARE_BYTES: Final = 16 << 20

Pair: TypeAlias = tuple[Tensor, Tensor]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def can_swap(pairs: Iterable[Pair]) -> list[bool]:
    """For each (live, new), whether it can be swapped; never if two tensors share memory."""
    seen: set[int] = set()
    found = []
    for live, new in pairs:
        places = {live.data_ptr(), new.data_ptr()} if _plain(live) and _plain(new) else set()
        apart = len(places) == 2 and not places & seen
        found.append(apart and live.dtype == new.dtype and live.shape == new.shape)
        seen |= places
    return found


def swap_tensors(pairs: Iterable[Pair]) -> None:
    """Swaps all pairs or none; each must be `can_swap`. Raises MemoryError or RuntimeError."""
    spare = np.empty(PIECE_BYTES, np.uint8)
    moved: list[tuple[Bytes, Bytes]] = []

    def move(one: Bytes, other: Bytes) -> None:
        room = np.empty(min(PIECE_BYTES, one.nbytes), np.uint8)
        _exchange(one, other, room)
        moved.append((one, other))

    try:
        _each_share(pairs, move)
    except Exception:  # no memory or no thread for one of them; no thread moves any more
        for one, other in moved:
            _exchange(one, other, spare)
        raise


def copy_tensors(pairs: Iterable[Pair]) -> None:
    """Copies the new values over the live ones; each pair must be `can_swap`."""
    _each_share(pairs, np.copyto)


def _plain(tensor: Tensor) -> bool:
    ours = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return ours and tensor.is_contiguous() and tensor.numel() > 0


def _each_share(pairs: Iterable[Pair], move: Callable[[Bytes, Bytes], None]) -> None:
    shares = [share for pair in pairs for share in _shares(*pair)]
    cores = min(len(os.sched_getaffinity(0)), max(len(shares), 1))
    with ThreadPoolExecutor(cores, thread_name_prefix="swap") as pool:
        for _ in pool.map(move, *zip(*shares, strict=True)) if shares else ():
            pass


def _shares(live: Tensor, new: Tensor) -> Iterator[tuple[Bytes, Bytes]]:
    one, other = _bytes(live), _bytes(new)
    for start in range(0, one.nbytes, SHARE_BYTES):
        yield one[start : start + SHARE_BYTES], other[start : start + SHARE_BYTES]


def _bytes(tensor: Tensor) -> Bytes:
    found: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return found


def _exchange(one: Bytes, other: Bytes, room: Bytes) -> None:
    for start in range(0, one.nbytes, PIECE_BYTES):
        a, b = one[start : start + PIECE_BYTES], other[start : start + PIECE_BYTES]
        kept = room[: a.nbytes]
        np.copyto(kept, a)
        np.copyto(a, b)
        np.copyto(b, kept)
