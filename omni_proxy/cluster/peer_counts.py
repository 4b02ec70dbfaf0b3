"""In-flight counts of the other proxies, and this proxy's share of a worker's bound.

Invariants: `totals` has, for each target, the sum over all peers whose last message is at most
`lease_secs` old. After a gap in a peer's message numbers its counts stay unchanged until it
publishes all of them; no count is negative. The counts are slightly old, so all proxies would take
the same free slot: each has a share of the slots (remainders are distributed by worker key), and
other free slots go to one proxy at a time among those with waiting requests. Together they start no
more than their shares and the free slots, and each waiting proxy gets its share eventually. Pure:
time is an argument, in monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Final, NamedTuple

from omni_proxy.cluster.messages import CountsMessage

MAX_IN_FLIGHT: Final = 1 << 20  # at one target, of one peer: higher counts are invalid
_NOTHING: Final[frozenset[int]] = frozenset()


class Peer:
    """Another proxy. `is_whole`: no message is missing since it last published all its counts."""

    __slots__ = ("in_flight", "is_whole", "last_message_at", "number", "total", "waits")

    def __init__(self, now: float) -> None:
        self.last_message_at = now
        self.in_flight: dict[int, int] = {}
        self.is_whole = False
        self.number = 0
        self.total = 0
        self.waits = False


class PeerCounts:
    """Counts of all peers. `member`: this proxy's name, whose messages are ignored."""

    def __init__(self, member: str) -> None:
        self.member = member
        self.peers: dict[str, Peer] = {}
        self.totals: dict[int, int] = {}

    def take(self, message: CountsMessage, now: float) -> Iterable[int]:
        """Merge a message; return the targets whose total may have changed."""
        if message.member == self.member:
            return _NOTHING
        peer = self.peers.get(message.member)
        if peer is None:
            peer = self.peers[message.member] = Peer(now)
        elif message.number <= peer.number:
            return _NOTHING
        follows = peer.is_whole and message.number == peer.number + 1
        peer.last_message_at = now
        peer.number = message.number
        peer.total, peer.waits = _bounded(message.total), message.waits
        peer.is_whole = message.whole or follows
        if not peer.is_whole:
            return _NOTHING
        changed = set(message.in_flight)
        if message.whole:
            changed |= peer.in_flight.keys()
        for target in changed:
            self._set(peer, target, _bounded(message.in_flight.get(target, 0)))
        return changed

    def leave(self, member: str) -> Iterable[int]:
        """Remove a member that has ended; return the targets whose total has changed."""
        peer = self.peers.pop(member, None)
        if peer is None:
            return _NOTHING
        changed = list(peer.in_flight)
        for target in changed:
            self._set(peer, target, 0)
        return changed

    def expire(self, now: float, lease_secs: float) -> dict[str, Iterable[int]]:
        """Remove peers that sent nothing for `lease_secs`.

        Returns the targets whose total has changed, by peer name.
        """
        silent = [
            name for name, peer in self.peers.items() if now - peer.last_message_at > lease_secs
        ]
        return {name: self.leave(name) for name in silent}

    def _set(self, peer: Peer, target: int, count: int) -> None:
        before = peer.in_flight.get(target, 0)
        total = self.totals.get(target, 0) + count - before
        if count:
            peer.in_flight[target] = count
        else:
            peer.in_flight.pop(target, None)
        if total:
            self.totals[target] = total
        else:
            self.totals.pop(target, None)


def _bounded(count: int) -> int:
    return min(max(count, 0), MAX_IN_FLIGHT)


class OwnCounts:
    """Makes this proxy's count messages. It has the last published counts."""

    def __init__(self, member: str) -> None:
        self.member = member
        self._number = 0
        self._in_flight: dict[int, int] = {}
        self._waits = False

    def message(
        self, in_flight: Mapping[int, int], total: int, *, waits: bool, whole: bool
    ) -> CountsMessage | None:
        """The message to publish now; None if nothing has changed.

        `in_flight`: counts above 0, by target.
        """
        before = self._in_flight
        if whole:
            changes = dict(in_flight)
        else:
            changes = {key: n for key, n in in_flight.items() if before.get(key) != n}
            changes |= dict.fromkeys(before.keys() - in_flight.keys(), 0)
            if not changes and waits == self._waits:
                return None
        self._in_flight, self._waits = dict(in_flight), waits
        self._number += 1
        return CountsMessage(self.member, self._number, whole, total, waits, changes)


FAST_SHARE: Final = 0.5
FLUCTUATIONS: Final = 2.0  # a difference above this multiple of the square root is significant
SAME: Final = 0.05
FIRST: Final = 0.1  # first value of a total: enough to prefer an idle worker


# Smoothing. Counts of other proxies are slightly old, and all proxies use them: they would all send
# to the worker that looked emptiest, and overshoot together. A low-pass filter therefore removes
# ordinary fluctuation, so that proxies correct only lasting differences; own counts are exact and
# not filtered. A significant difference, such as a burst or a lost proxy, is followed fast.
def first_seen(before: float, total: int) -> float:
    """The value when a total arrives, before the next `smoothed`."""
    return before or min(FIRST, total)


def smoothed(before: float, total: int, share: float) -> float:
    """The next value. `share`: the part of an ordinary difference that one step corrects."""
    difference = total - before
    if abs(difference) > FLUCTUATIONS * sqrt(max(total, before) + 1):
        share = max(share, FAST_SHARE)
    value = before + min(1.0, share) * difference
    return float(total) if abs(total - value) < SAME else value


@dataclass(frozen=True, slots=True)
class Sharing:
    """The sharing proxies. `rank`: this proxy's index among the `members`, ordered by name.

    `taker_rank` and `takers`: its index among the proxies that take turns, and their number; None
    if this one doesn't. `turn`: increases by one when free slots go to the next proxy.
    `others_wait`: other proxies have waiting requests, so slots above the own share are given up
    when their requests end.
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
    peer_in_flight: int
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
    free = max(0, use.bound - kept - use.peer_in_flight - use.reserved)
    granted = 0
    if sharing.taker_rank is not None:
        # This proxy gets every `takers`-th of the free slots 0, 1, …
        first = (sharing.taker_rank - target - sharing.turn) % sharing.takers
        granted = len(range(first, free, sharing.takers))
    most = share if sharing.others_wait and not granted else kept + granted
    return min(most, max(0, use.bound - use.peer_in_flight))
