"""Shares of a worker's in-flight bound: how many requests this proxy may have there. No I/O.

Counts of other proxies are slightly old, so all proxies that see a free slot would take it.
Therefore each proxy has a share of the slots (remainders are distributed by worker key, so a proxy
without one at one worker has one at another). Other free slots go to one proxy at a time, in turn,
among those with waiting requests. A proxy above its share gives slots up while another one waits.
Invariant, for proxies with the same counts: none exceeds the bound alone; together they start no
more than their shares and the free slots; each waiting proxy gets its share eventually.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Sharing:
    """The sharing proxies. `rank`: this proxy's index among the `members`, ordered by name.

    `taker_rank` and `takers`: the same among the proxies that take turns; None if this one doesn't.
    `turn`: increases by one when free slots go to the next proxy. `others_wait`: other proxies have
    waiting requests, so slots above the own share are given up when their requests end.
    """

    members: int
    rank: int
    takers: int
    taker_rank: int | None
    turn: int
    others_wait: bool


class Use(NamedTuple):
    """Use of a worker's `bound`: own requests in flight, those of other proxies as last reported,
    and slots reserved for the shares of waiting proxies."""

    bound: int
    own: int
    elsewhere: int
    reserved: int = 0


def share_of(bound: int, members: int, rank: int, target: int) -> int:
    """A member's share of the slots. `target`: the worker's key."""
    return bound // members + ((rank - target) % members < bound % members)


def own_limit(use: Use, sharing: Sharing, target: int) -> int:
    """How many requests this proxy may have in flight at the worker now."""
    if sharing.members < 2:
        return use.bound
    share = share_of(use.bound, sharing.members, sharing.rank, target)
    kept = max(use.own, share)
    # Free slots outside of all shares, and in shares of proxies that don't need them.
    free = max(0, use.bound - kept - use.elsewhere - use.reserved)
    granted = 0
    if sharing.taker_rank is not None:
        # This proxy gets every `takers`-th of the free slots 0, 1, …
        first = (sharing.taker_rank - target - sharing.turn) % sharing.takers
        granted = len(range(first, free, sharing.takers))
    most = share if sharing.others_wait and not granted else kept + granted
    return min(most, max(0, use.bound - use.elsewhere))
