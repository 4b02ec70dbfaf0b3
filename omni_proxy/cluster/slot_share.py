"""A worker's bound over several proxies: how many requests this one may have at it.

Counts of others are a moment old, so proxies that all see the same free place would all take it.
Therefore a bound is parted: each proxy has a share of its places (which one has the odd ones
follows from the worker, so proxies with none at one worker have one at another), and a free place
beyond that goes to one proxy at a time, in turn, among those with requests that wait. Who has more
than its share does not replace what ends while another waits. Invariant: of proxies with the same
knowledge none may begin what would exceed the bound by itself, all of them together may begin no
more than their shares and what is free, and each that waits gets its share in the end. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who shares. `rank`: the own place among `members` members, in the order of their names.
    `taker_rank` and `takers`: the same among those that take turns, None for one that does not.
    `turn` rises by one each time that free places are given to the next. `others_wait`: so a place
    above the own share is given up when its request ends."""

    members: int
    rank: int
    takers: int
    taker_rank: int | None
    turn: int
    others_wait: bool


class Use(NamedTuple):
    """Of a worker's `bound`: the own requests in flight, those of others as last heard, and the
    places that others, which wait, may still take of their shares."""

    bound: int
    own: int
    elsewhere: int
    reserved: int = 0


def share_of(bound: int, members: int, rank: int, target: int) -> int:
    """Places that are one member's own. `target`: the worker's key."""
    return bound // members + ((rank - target) % members < bound % members)


def own_limit(use: Use, sharing: Sharing, target: int) -> int:
    """The most requests in flight that this proxy may have at the worker now."""
    if sharing.members < 2:
        return use.bound
    share = share_of(use.bound, sharing.members, sharing.rank, target)
    kept = max(use.own, share)
    # Free places of nobody's share, and of shares of those that do not need them.
    free = max(0, use.bound - kept - use.elsewhere - use.reserved)
    granted = 0
    if sharing.taker_rank is not None:
        # Of the free places 0, 1, … those that are this proxy's turn.
        first = (sharing.taker_rank - target - sharing.turn) % sharing.takers
        granted = len(range(first, free, sharing.takers))
    most = share if sharing.others_wait and not granted else kept + granted
    return min(most, max(0, use.bound - use.elsewhere))
