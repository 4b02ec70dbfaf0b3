"""Shares in-flight counts: publishes this proxy's, and adds those of other proxies to the fleet.

Invariant: only this proxy's requests, of all its processes, are published, and only those of other
proxies are added to the fleet's counts, so that none is counted twice. When sharing ends, each
worker's count is this proxy's only. `member` sends and receives the messages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, Protocol

from omni_proxy.cluster.messages import CountsMessage, target_key
from omni_proxy.cluster.peer_counts import (
    OwnCounts,
    Peer,
    PeerCounts,
    Sharing,
    Use,
    first_seen,
    own_limit,
    share_of,
    smoothed,
)
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker

_log = logging.getLogger(__name__)

# A proxy counts as waiting for this long after its last waiting request: after a free slot is used,
# the next request may arrive a moment later.
WAITS_SECS: Final = 1.0
SMOOTH_SECS: Final = 1.0
TURN_INTERVALS: Final = 2  # publish intervals per turn, so that others see its effect in time


class LoadView(Protocol):
    """The requests of this proxy, in all its processes."""

    def recount(self) -> None: ...
    @property
    def load(self) -> tuple[int, int]:
        """The numbers of requests in flight and of waiting requests."""

    @property
    def can_wait(self) -> bool:
        """Whether requests may wait for a worker."""

    def set_peer_in_flight(self, total: int) -> None:
        """Set the number of requests in flight at the other proxies."""

    def follow_cluster(self, *, member: bool) -> None:
        """Set whether all processes use the values that `share` publishes."""

    def share(self, target: Worker) -> None:
        """Publish a changed `inflight_bound` or `load_offset` to all processes."""

    def room_made(self) -> None:
        """Serve the admission queue: a worker may have a free slot now."""


class SharedLoad:
    def __init__(self, fleet: Fleet, view: LoadView, member: str) -> None:
        self.counts = PeerCounts(member)
        self._own = OwnCounts(member)
        self._fleet = fleet
        self._view = view
        self._targets: dict[int, Worker] = {}
        self._smooth: dict[int, float] = {}  # smoothed counts above 0 of other proxies
        self._waited_at = self._waits_since = float("-inf")
        self._waiting_peers: list[tuple[int, Peer]] = []  # rank and peer
        self._sharing: Sharing | None = None  # None: this proxy may use whole bounds
        self.follow_fleet()

    def own_message(self, now: float, *, whole: bool) -> CountsMessage | None:
        """The next message of this proxy's counts; None if nothing has changed."""
        self._view.recount()
        own = {}
        for key, target in self._targets.items():
            in_flight = target.in_flight - target.peer_in_flight
            if in_flight:
                own[key] = in_flight
        total, waiting = self._view.load
        if waiting:
            if not self._waits(now):
                self._waits_since = now
            self._waited_at = now
        return self._own.message(own, total, waits=self._waits(now), whole=whole)

    def follow_fleet(self) -> None:
        """Call it after a change of many workers, before any request is sent to one of them."""
        targets = {target_key(target.url): target for target in self._fleet.targets()}
        for key, target in self._targets.items():
            if targets.get(key) is not target:
                self._fleet.set_peer_in_flight(target, 0)
        self._targets = targets
        for key, target in targets.items():
            self._apply(key, target)

    def follow_worker(self, worker: Worker) -> None:
        """As `follow_fleet`, after a change of one worker: it may have new ranks."""
        if self._fleet.find(worker.url) is not worker:
            return
        for target in (worker, *self._fleet.known_ranks(worker)):
            key = target_key(target.url)
            self._targets[key] = target
            self._apply(key, target)

    def take(self, message: CountsMessage, now: float) -> None:
        if message.member not in self.counts.peers and message.member != self.counts.member:
            _log.info("cluster_peer_joined peer=%s", message.member)
        self._count(self.counts.take(message, now))

    def leave(self, member: str) -> None:
        """A peer has deregistered."""
        if member in self.counts.peers:
            _log.info("cluster_peer_signed_off peer=%s was=cluster_peer_left", member)
            self._count(self.counts.leave(member))

    def expire(self, now: float, secs: float) -> None:
        """Remove peers that sent nothing for `secs`."""
        for name, changed in self.counts.expire(now, secs).items():
            _log.warning(
                "cluster_peer_lease_expired peer=%s was=cluster_peer_gone silent_secs=%g",
                name,
                secs,
            )
            self._count(changed)

    def smooth(self, table: ClusterConfig) -> None:
        """Update the smoothed counts; call it every `publish_secs`."""
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
                target.load_offset = _offset(value, total)
                self._view.share(target)

    def share_bounds(self, now: float, store_now: float, table: ClusterConfig) -> None:
        """Share the bounds of workers for the current turn.

        `store_now`: the store's clock, the same for all proxies.
        """
        if not self._fleet.has_inflight_limits:
            return
        turn = int(store_now / (TURN_INTERVALS * table.publish_secs))
        # Wait a turn, so that other waiting proxies have reported it by then.
        waits = now - self._waits_since >= TURN_INTERVALS * table.publish_secs
        self._sharing = self._sharing_at(turn, waits=waits and self._waits(now))
        grown = [key for key, target in self._targets.items() if self._share_bound(key, target)]
        if grown:
            self._view.room_made()

    def forget(self) -> None:
        """Stop to share: drop all peers' counts."""
        self._sharing = None
        for name in list(self.counts.peers):
            self._count(self.counts.leave(name))
        self._smooth.clear()
        for key, target in self._targets.items():
            target.load_offset = 0
            self._share_bound(key, target)
            self._view.share(target)
        self._view.follow_cluster(member=False)
        self._view.room_made()

    def _sharing_at(self, turn: int, *, waits: bool) -> Sharing | None:
        """The sharing at this turn. None without peers, and without an admission queue: then a
        request would be refused instead of waiting for its turn."""
        peers, own = self.counts.peers, self.counts.member
        if not peers or not self._view.can_wait:
            return None
        members = sorted((*peers, own))
        takers = [name for name in members if (waits if name == own else peers[name].waits)]
        if not takers:
            # All proxies take turns, so that a simultaneous burst finds each slot at one of them.
            takers, turn = members, 0
        rank = takers.index(own) if own in takers else None
        self._waiting_peers = [
            (members.index(name), peer) for name, peer in peers.items() if peer.waits
        ]
        others_wait = bool(self._waiting_peers)
        return Sharing(len(members), members.index(own), len(takers), rank, turn, others_wait)

    def _share_bound(self, key: int, target: Worker) -> bool:
        """Update a worker's bound. Returns whether it has increased."""
        bound, before = target.max_inflight, target.inflight_bound
        if not bound:
            return False
        limit = bound
        if self._sharing is not None:
            peer_in_flight = target.peer_in_flight
            reserved = self._reserved(key, bound, self._sharing.members)
            use = Use(bound, target.in_flight - peer_in_flight, peer_in_flight, reserved)
            limit = peer_in_flight + own_limit(use, self._sharing, key)
        if limit != before:
            target.inflight_bound = limit
            self._view.share(target)
        return limit > before

    def _reserved(self, key: int, bound: int, members: int) -> int:
        """See `peer_counts.Use`. A peer without requests at the target gets no reservation."""
        return sum(
            max(0, share_of(bound, members, rank, key) - peer.in_flight[key])
            for rank, peer in self._waiting_peers
            if key in peer.in_flight
        )

    def _waits(self, now: float) -> bool:
        return now - self._waited_at < WAITS_SECS

    def _count(self, keys: Iterable[int]) -> None:
        made_room = False
        for key in keys:
            target = self._targets.get(key)
            if target is not None:
                before = target.peer_in_flight
                self._apply(key, target)
                made_room |= target.peer_in_flight < before
        self._view.set_peer_in_flight(sum(peer.total for peer in self.counts.peers.values()))
        if made_room:
            self._view.room_made()

    def _apply(self, key: int, target: Worker) -> None:
        """Apply the known load of other proxies, and the own share of the bound, to a target."""
        peer_in_flight = self.counts.totals.get(key, 0)
        self._fleet.set_peer_in_flight(target, peer_in_flight)
        smooth = first_seen(self._smooth.get(key, 0.0), peer_in_flight)
        if smooth:
            self._smooth[key] = smooth
        target.load_offset = _offset(smooth, peer_in_flight)  # policies get the change gradually
        self._share_bound(key, target)
        self._view.share(target)


def _offset(smooth: float, total: int) -> float:
    """The difference; the integer 0 if there is none, which CPython adds faster to an integer."""
    return smooth - total or 0
