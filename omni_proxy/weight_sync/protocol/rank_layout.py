"""The ranks of workers in a trainer's group: how many each has, and which ones it gets. Pure.

The ranges are consecutive from the trainer's offset, in the order of the workers. Invariant: a
layout that is returned can't make a participant wait until the group's timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def count_ranks(info: object) -> int:
    """The number of ranks of a worker, from its /server_info; 1 if it reports none."""
    size = info.get("tp_size") if isinstance(info, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1


class RankLayoutError(ValueError):
    """The ranks don't fit into the group; the message is for the caller that sent the numbers."""


@dataclass(frozen=True, slots=True)
class RankRange:
    """The ranks of one participant: `rank_count` consecutive ones, starting at `offset`."""

    name: str
    rank_count: int
    offset: int


def assign_ranks(
    rank_offset: int, world_size: int, rank_counts: Mapping[str, int]
) -> tuple[RankRange, ...]:
    """Assign ranges in the order of `rank_counts` (participant to rank count).

    Raises RankLayoutError.
    """
    total = sum(rank_counts.values())
    listing = ", ".join(f"{name}: {count}" for name, count in rank_counts.items())
    if not rank_counts or min(rank_counts.values()) < 1:
        raise RankLayoutError(
            f"there must be a participant, and each needs at least one rank: {listing}"
        )
    if rank_offset < 1:
        raise RankLayoutError(
            f"rank_offset {rank_offset}: rank 0 is the trainer's, so it must be 1 or higher"
        )
    end = rank_offset + total
    if end > world_size:
        raise RankLayoutError(
            f"rank_offset {rank_offset} + {total} ranks behind this endpoint ({listing}) = {end}, "
            f"but world_size is {world_size}: a group with them needs at least {end}. The tp_size "
            "of this endpoint's /server_info is the number of its ranks"
        )
    ranges, offset = [], rank_offset
    for name, count in rank_counts.items():
        ranges.append(RankRange(name, count, offset))
        offset += count
    return tuple(ranges)
