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


def share_of(bound: int, sharing: Sharing, target: int) -> int:
    """Places that are this proxy's own. `target`: the worker's key."""
    odd = (sharing.rank - target) % sharing.members < bound % sharing.members
    return bound // sharing.members + odd


def own_limit(bound: int, own: int, elsewhere: int, sharing: Sharing, target: int) -> int:
    """The most requests in flight that this proxy may have at the worker now. `own`: those that it
    has; `elsewhere`: those of the others, as last heard."""
    if sharing.members < 2:
        return bound
    free = max(0, bound - own - elsewhere)
    granted = 0
    if sharing.taker_rank is not None:
        # Of the free places 0, 1, … those that are this proxy's turn.
        first = (sharing.taker_rank - target - sharing.turn) % sharing.takers
        granted = len(range(first, free, sharing.takers))
    kept = 0 if sharing.others_wait and not granted else own + granted
    return min(max(share_of(bound, sharing, target), kept), max(0, bound - elsewhere))
