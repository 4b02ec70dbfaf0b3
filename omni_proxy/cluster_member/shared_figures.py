"""Shares the figures that screens and charts show: this proxy's own go out, those of others come.

Invariant: no decision depends on them, and a request pays nothing for them: a message a second, of
a bounded size. `member` sends and receives.
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
from omni_proxy.telemetry.history.rings import Bin, History


class FiguresSource(Protocol):
    """The figures of this proxy, in all its processes."""

    @property
    def history(self) -> History: ...
    def read(self, part: int, local_host: str) -> ProxyFigures:
        """`part`: of the workers. `local_host`: by which this machine is reached."""


class SharedFigures:
    def __init__(self, source: FiguresSource) -> None:
        self._source = source
        self._peers = PeerFigures()
        self._own: ProxyFigures | None = None
        self._due = 0.0
        self._part = 0

    def begin(self) -> None:
        """The store is connected: what was counted before is too old for the others."""
        self._source.history.follow_cluster(member=True)
        self._source.history.take_unsent()

    def forget(self) -> None:
        """This proxy is alone."""
        self._source.history.follow_cluster(member=False)
        self._peers, self._own = PeerFigures(), None

    async def tick(self, connection: RedisConnection, channel: str, member: str) -> None:
        """Publish when it is time. Raises StoreError."""
        now = trio.current_time()
        if now < self._due:
            return
        self._due = now + FIGURES_SECS
        self._part = (self._part + 1) % PARTS
        self._own = self._source.read(self._part, connection.local_host)
        await connection.call(("PUBLISH", channel, encode(FiguresMessage(member, self._own))))

    def take(self, message: FiguresMessage, members: Iterable[str]) -> None:
        """`members`: the others that are known now."""
        if message.member in members:
            self._peers.take(message.member, message.figures)
            self._source.history.add_of_peer(time.time(), _bin_of(message.figures.counted))

    def keep(self, members: Iterable[str], in_flight: int) -> None:
        """These are the others now, with so many requests in flight."""
        self._peers.keep(members)
        self._source.history.elsewhere = (in_flight, self._peers.waiting)

    def elsewhere(self, worker: Worker) -> WorkerFigures:
        return self._peers.elsewhere(target_key(worker.url))

    def record_of(self, member: str) -> dict[str, object]:
        return _record(self._peers.of(member))

    def own_record(self) -> dict[str, object]:
        return _record(self._own)


def _record(figures: ProxyFigures | None) -> dict[str, object]:
    """JSON-ready; empty where nothing was heard, as of a proxy of an older release."""
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
    """Buckets that this release does not have are left out."""
    firsts = {at: count for at, count in counted.firsts.items() if 0 <= at <= len(FINE)}
    gaps = {at: count for at, count in counted.gaps.items() if 0 <= at <= len(BETWEEN_CHUNKS)}
    return Bin(**asdict(counted) | {"firsts": firsts, "gaps": gaps})
