"""Holders as bits of an integer, so that a set of holders is a mask."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Holder = TypeVar("Holder", bound=Hashable)


def mask_of(bits: Mapping[Holder, int], holders: Iterable[Holder]) -> int:
    """The bits of those of the holders that have one."""
    mask = 0
    for holder in holders:
        mask |= bits.get(holder, 0)
    return mask


def lowest_free_bit(used: int) -> int:
    return ~used & (used + 1)
