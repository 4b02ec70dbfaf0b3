"""Which ranks of a trainer's group each member takes: one after another, from the offset we got.

Invariant: a layout that exists fits the group and gives no rank twice. One that does not fit would
hang every party until the group's timeout, so it is refused with the arithmetic that shows why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def ranks_in(info: object) -> int:
    """How many a server has, by its /server_info; 1 where it does not say."""
    size = info.get("tp_size") if isinstance(info, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1


class RankLayoutError(ValueError):
    """The text is meant for whoever sent the numbers."""


@dataclass(frozen=True, slots=True)
class RankRange:
    """A member's place: `ranks` of them from rank `offset` on."""

    name: str
    ranks: int
    offset: int


def seats_of(rank_offset: int, world_size: int, ranks: Mapping[str, int]) -> tuple[RankRange, ...]:
    """In the order of `ranks` (member to its count of ranks). Raises RankLayoutError."""
    counted = sum(ranks.values())
    named = ", ".join(f"{name}: {count}" for name, count in ranks.items())
    if not ranks or min(ranks.values()) < 1:
        raise RankLayoutError(f"every member needs a rank at least, and there must be one: {named}")
    if rank_offset < 1:
        raise RankLayoutError(
            f"rank_offset {rank_offset}: rank 0 is the trainer's, so ours begin at 1 or later"
        )
    end = rank_offset + counted
    if end > world_size:
        raise RankLayoutError(
            f"rank_offset {rank_offset} + {counted} ranks behind this endpoint ({named}) = {end}, "
            f"but world_size is {world_size}: a group with them needs at least {end}. The tp_size "
            "of this endpoint's /server_info is the number of its ranks"
        )
    found, offset = [], rank_offset
    for name, count in ranks.items():
        found.append(RankRange(name, count, offset))
        offset += count
    return tuple(found)
