"""Shares figures for dashboards and charts: publishes this proxy's, and receives those of others.

Invariant: no decision depends on them, and they cost a request nothing: one message a second, of
bounded size. `member` sends and receives.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import trio
from msgspec.structs import asdict

from omni_proxy.cluster.messages import FiguresMessage, encode, target_key
from omni_proxy.cluster.proxy_figures import (
    FIGURES_SECS,
    PARTS,
    CountedFigures,
    PeerFigures,
    ProxyFigures,
    WorkerFigures,
)
from omni_proxy.cluster_member.store_connection import RedisConnection
from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.histogram import BETWEEN_CHUNKS, FINE
from omni_proxy.telemetry.history import Bin, History


class FiguresSource(Protocol):
    """The figures of this proxy, in all its processes."""

    @property
    def history(self) -> History: ...
    def read(self, part: int, local_host: str) -> ProxyFigures:
        """`part`: number of the part of the workers. `local_host`: address of this machine."""


class SharedFigures:
    def __init__(self, source: FiguresSource) -> None:
        self._source = source
        self._peers = PeerFigures()
        self._own: ProxyFigures | None = None
        self._due = 0.0
        self._part = 0

    def begin(self) -> None:
        """Start to share, when the store is connected. Counts from before it are discarded."""
        self._source.history.follow_cluster(member=True)
        self._source.history.take_unsent()

    def forget(self) -> None:
        """Stop to share: drop the others' figures."""
        self._source.history.follow_cluster(member=False)
        self._peers, self._own = PeerFigures(), None

    async def tick(self, connection: RedisConnection, channel: str, member: str) -> None:
        """Publish if it is due. Raises StoreError."""
        now = trio.current_time()
        if now < self._due:
            return
        self._due = now + FIGURES_SECS
        self._part = (self._part + 1) % PARTS
        self._own = self._source.read(self._part, connection.local_host)
        await connection.call(("PUBLISH", channel, encode(FiguresMessage(member, self._own))))

    def take(self, message: FiguresMessage, members: Iterable[str]) -> None:
        """Receive a message. `members`: the known other members; messages of others are ignored."""
        if message.member in members:
            self._peers.take(message.member, message.figures)
            self._source.history.add_of_peer(time.time(), _bin_of(message.figures.counted))

    def keep(self, members: Iterable[str], in_flight: int) -> None:
        """Drop other members than these. `in_flight`: their requests in flight together."""
        self._peers.keep(members)
        self._source.history.peers = (in_flight, self._peers.waiting)

    def peer_figures(self, worker: Worker) -> WorkerFigures:
        return self._peers.peer_figures(target_key(worker.url))

    def record_of(self, member: str) -> dict[str, object]:
        return _record(self._peers.of(member))

    def own_record(self) -> dict[str, object]:
        return _record(self._own)


def _record(figures: ProxyFigures | None) -> dict[str, object]:
    """JSON-ready; empty if nothing was received, for example from a proxy of an older release."""
    if figures is None:
        return {}
    return {
        "version": figures.version,
        "uptime_secs": round(max(0.0, time.time() - figures.started_at), 1),
        "dashboard": figures.dashboard or None,
        "waiting": figures.waiting,
        "loop_lag_ms": figures.lag_ms,
        "requests_per_sec": figures.requests_per_sec,
        "errors_last_minute": figures.errors,
        "output_tokens_per_sec": figures.output_tokens_per_sec,
    }


def _bin_of(counted: CountedFigures) -> Bin:
    """The counts as a Bin, without buckets that this release does not have."""
    firsts = {at: count for at, count in counted.firsts.items() if 0 <= at <= len(FINE)}
    gaps = {at: count for at, count in counted.gaps.items() if 0 <= at <= len(BETWEEN_CHUNKS)}
    return Bin(**asdict(counted) | {"firsts": firsts, "gaps": gaps})
