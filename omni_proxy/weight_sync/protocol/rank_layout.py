"""Which ranks of a trainer's group each member takes: consecutive, from the given rank offset.
Pure.

Invariant: a layout that is returned fits the group and gives no rank twice. One that does not fit
would hang all parties until the group's timeout, so it is refused, and the error shows the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def count_ranks(info: object) -> int:
    """The number of ranks of a server, from its /server_info; 1 if it does not say."""
    size = info.get("tp_size") if isinstance(info, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1


class RankLayoutError(ValueError):
    """The ranks do not fit; the message is for the sender of the numbers."""


@dataclass(frozen=True, slots=True)
class RankRange:
    """The ranks of one member: `ranks` of them from rank `offset` on."""

    name: str
    ranks: int
    offset: int


def assign_ranks(
    rank_offset: int, world_size: int, ranks: Mapping[str, int]
) -> tuple[RankRange, ...]:
    """In the order of `ranks` (member to its number of ranks). Raises RankLayoutError."""
    total = sum(ranks.values())
    listing = ", ".join(f"{name}: {count}" for name, count in ranks.items())
    if not ranks or min(ranks.values()) < 1:
        raise RankLayoutError(
            f"every member needs a rank at least, and there must be one: {listing}"
        )
    if rank_offset < 1:
        raise RankLayoutError(
            f"rank_offset {rank_offset}: rank 0 is the trainer's, so ours begin at 1 or later"
        )
    end = rank_offset + total
    if end > world_size:
        raise RankLayoutError(
            f"rank_offset {rank_offset} + {total} ranks behind this endpoint ({listing}) = {end}, "
            f"but world_size is {world_size}: a group with them needs at least {end}. The tp_size "
            "of this endpoint's /server_info is the number of its ranks"
        )
    ranges, offset = [], rank_offset
    for name, count in ranks.items():
        ranges.append(RankRange(name, count, offset))
        offset += count
    return tuple(ranges)
