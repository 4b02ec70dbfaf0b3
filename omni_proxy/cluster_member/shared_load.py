"""Shares in-flight counts: this proxy's own go out, those of others are counted in the fleet.

Invariant: what is published are this proxy's requests alone, of all its processes, and what the
fleet counts in addition are the others', so that nothing is counted twice. With counts that end,
every worker's count is this proxy's own again. No I/O: `member` sends and receives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, Protocol

from omni_proxy.cluster.messages import CountsMessage, target_key
from omni_proxy.cluster.peer_counts import OwnCounts, Peer, PeerCounts, first_seen, smoothed
from omni_proxy.cluster.slot_share import Sharing, Use, own_limit, share_of
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker

_log = logging.getLogger(__name__)

# Requests that waited so recently count as waiting: of a free place that is given, the next waiter
# may come a moment later.
WAITS_SECS: Final = 1.0
SMOOTH_SECS: Final = 1.0
TURN_INTERVALS: Final = 2  # of publishing: others know of the last turn before the next one


class LoadView(Protocol):
    """The requests of this proxy, in all its processes."""

    def recount(self) -> None: ...
    @property
    def load(self) -> tuple[int, int]:
        """In flight, and waiting."""

    @property
    def can_wait(self) -> bool:
        """Whether requests may wait for a worker."""

    def set_elsewhere(self, total: int) -> None:
        """So many are in flight at the other proxies."""

    def follow_cluster(self, *, member: bool) -> None:
        """Whether it is a member of a cluster: all processes follow what is shared with `share`."""

    def share(self, target: Worker) -> None:
        """Its `inflight_bound` or `load_offset` has changed."""

    def room_made(self) -> None:
        """A worker may have room that it had not."""


class SharedLoad:
    def __init__(self, fleet: Fleet, view: LoadView, member: str) -> None:
        self.counts = PeerCounts(member)
        self._own = OwnCounts(member)
        self._fleet = fleet
        self._view = view
        self._targets: dict[int, Worker] = {}
        self._smooth: dict[int, float] = {}  # in flight elsewhere, those with none left out
        self._waited_at = self._waits_since = float("-inf")
        self._revision = -1
        self._waiting_peers: list[tuple[int, Peer]] = []  # with their ranks
        self._sharing: Sharing | None = None  # None: the bounds are this proxy's alone
        self._follow_fleet()

    def own_message(self, now: float, *, whole: bool) -> CountsMessage | None:
        """What the others don't know yet; None for nothing."""
        self._follow_fleet()
        self._view.recount()
        own = {}
        for key, target in self._targets.items():
            in_flight = target.in_flight - target.in_flight_elsewhere
            if in_flight:
                own[key] = in_flight
        total, waiting = self._view.load
        if waiting:
            if not self._waits(now):
                self._waits_since = now
            self._waited_at = now
        return self._own.message(own, total, waits=self._waits(now), whole=whole)

    def take(self, message: CountsMessage, now: float) -> None:
        if message.member not in self.counts.peers and message.member != self.counts.member:
            _log.info("cluster_peer_joined peer=%s", message.member)
        self._count(self.counts.take(message, now))

    def leave(self, member: str) -> None:
        """It has said that it ends."""
        if member in self.counts.peers:
            _log.info("cluster_peer_left peer=%s", member)
            self._count(self.counts.leave(member))

    def expire(self, now: float, secs: float) -> None:
        """Peers that are silent for so long are gone."""
        for name, changed in self.counts.expire(now, secs).items():
            _log.warning("cluster_peer_gone peer=%s: nothing heard for %gs", name, secs)
            self._count(changed)

    def smooth(self, table: ClusterConfig) -> None:
        """Called each `publish_secs`."""
        totals, share = self.counts.totals, table.publish_secs / SMOOTH_SECS
        self._view.follow_cluster(member=True)
        for key in self._smooth.keys() | totals.keys():
            total = totals.get(key, 0)
            value = smoothed(self._smooth.get(key, 0.0), total, share)
            if value:
                self._smooth[key] = value
            else:
                self._smooth.pop(key, None)
            target = self._targets.get(key)
            if target is not None and target.load_offset != value - total:
                target.load_offset = value - total
                self._view.share(target)

    def share_bounds(self, now: float, store_now: float, table: ClusterConfig) -> None:
        """Free places of bounded workers go to the next. `store_now`: the store's clock, which all
        proxies read alike."""
        if not self._fleet.has_inflight_limits:
            return
        turn = int(store_now / (TURN_INTERVALS * table.publish_secs))
        # Others that wait, too, are heard of by then.
        waits = now - self._waits_since >= TURN_INTERVALS * table.publish_secs
        self._sharing = self._sharing_at(turn, waits=waits and self._waits(now))
        grown = [key for key, target in self._targets.items() if self._share_bound(key, target)]
        if grown:
            self._view.room_made()

    def forget(self) -> None:
        """This proxy is alone."""
        self._sharing = None
        for name in list(self.counts.peers):
            self._count(self.counts.leave(name))
        self._smooth.clear()
        for key, target in self._targets.items():
            target.load_offset = 0.0
            self._share_bound(key, target)
            self._view.share(target)
        self._view.follow_cluster(member=False)
        self._view.room_made()

    def _sharing_at(self, turn: int, *, waits: bool) -> Sharing | None:
        """None where nobody shares: without a queue what is not given at once is refused."""
        peers, own = self.counts.peers, self.counts.member
        if not peers or not self._view.can_wait:
            return None
        members = sorted((*peers, own))
        takers = [name for name in members if (waits if name == own else peers[name].waits)]
        if not takers:
            # A burst that comes to all of them at once finds each place with one of them.
            takers, turn = members, 0
        rank = takers.index(own) if own in takers else None
        self._waiting_peers = [
            (members.index(name), peer) for name, peer in peers.items() if peer.waits
        ]
        others_wait = bool(self._waiting_peers)
        return Sharing(len(members), members.index(own), len(takers), rank, turn, others_wait)

    def _share_bound(self, key: int, target: Worker) -> bool:
        """Whether there may be room now that was not."""
        bound, before = target.max_inflight, target.inflight_bound
        if not bound:
            return False
        limit = bound
        if self._sharing is not None:
            elsewhere = target.in_flight_elsewhere
            reserved = self._reserved(key, bound, self._sharing.members)
            use = Use(bound, target.in_flight - elsewhere, elsewhere, reserved)
            limit = elsewhere + own_limit(use, self._sharing, key)
        if limit != before:
            target.inflight_bound = limit
            self._view.share(target)
        return limit > before

    def _reserved(self, key: int, bound: int, members: int) -> int:
        """See `slot_share.Use`. Who has no request there may have none for it."""
        return sum(
            max(0, share_of(bound, members, rank, key) - peer.in_flight[key])
            for rank, peer in self._waiting_peers
            if key in peer.in_flight
        )

    def _waits(self, now: float) -> bool:
        return now - self._waited_at < WAITS_SECS

    def _count(self, keys: Iterable[int]) -> None:
        totals, made_room = self.counts.totals, False
        for key in keys:
            target = self._targets.get(key)
            if target is None:
                continue
            before, elsewhere = target.in_flight_elsewhere, totals.get(key, 0)
            self._fleet.set_elsewhere(target, elsewhere)
            smooth = self._smooth[key] = first_seen(self._smooth.get(key, 0.0), elsewhere)
            target.load_offset = smooth - elsewhere  # a policy sees the change bit by bit
            self._view.share(target)
            self._share_bound(key, target)
            made_room |= elsewhere < before
        self._view.set_elsewhere(sum(peer.total for peer in self.counts.peers.values()))
        if made_room:
            self._view.room_made()

    def _follow_fleet(self) -> None:
        if self._fleet.revision == self._revision:
            return
        self._revision = self._fleet.revision
        targets = {target_key(target.url): target for target in self._fleet.targets()}
        for key, target in self._targets.items():
            if targets.get(key) is not target:
                self._fleet.set_elsewhere(target, 0)
        self._targets = targets
        totals = self.counts.totals
        for key, target in targets.items():
            if target.in_flight_elsewhere != totals.get(key, 0):
                self._fleet.set_elsewhere(target, totals.get(key, 0))
