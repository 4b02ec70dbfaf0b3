"""Load and figures of this proxy for the other members of its cluster, and their figures for
dashboards and charts.

Invariant: the main process is the member. Requests of other proxies are counted in its row of the
shared counters, with the bounds, so that every data-plane process routes by them. No decision
depends on figures. They cost a request nothing, and one message a second, of bounded size: a call
reads only a part of the workers, so that the event loop never waits for all of them. `member` sends
and receives.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Protocol

import trio
from msgspec.structs import asdict

from omni_proxy import __version__
from omni_proxy.cluster.messages import FiguresMessage, encode, target_key
from omni_proxy.cluster.proxy_figures import (
    FIGURES_SECS,
    MAX_WORKERS,
    PARTS,
    CountedFigures,
    PeerFigures,
    ProxyFigures,
    WorkerFigures,
)
from omni_proxy.cluster.session_places import FINISHED
from omni_proxy.cluster_member.store_connection import RedisConnection
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.aggregate import AggregateView
from omni_proxy.multiprocess.ipc.messages import ClearCacheCommand, ClusterHintsCommand
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.routing.cluster_hints import ClusterHints
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.telemetry.histogram import BETWEEN_CHUNKS, FINE
from omni_proxy.telemetry.history import MINUTE_POINTS, MINUTE_RANGE, Bin, History
from omni_proxy.telemetry.instruments import Instruments

RATE_SECS = 10
RATE_POINTS = 2  # points of the history that token rates are averaged over
ANY_HOST = ("0.0.0.0", "[::]")


class OwnFigures:
    """See `FiguresSource`."""

    def __init__(self, fleet: Fleet, instruments: Instruments, view: AggregateView) -> None:
        self._fleet = fleet
        self._instruments = instruments
        self._view = view
        self._started_at = time.time()

    @property
    def history(self) -> History:
        return self._instruments.history

    def read(self, part: int, local_host: str) -> ProxyFigures:
        recent, now = self._instruments.recent, time.time()
        _, errors = recent.last_minute()
        points = list(recent.since(int(now) - RATE_SECS - 1))
        requests = sum(point.requests for point in points)
        fleet = self.history.fleet
        return ProxyFigures(
            __version__,
            self._started_at,
            self._dashboard(local_host),
            self._view.load[1],
            round(self._instruments.ticker.worst_secs * 1000, 1),
            round(requests / max(len(points), 1), 2),
            errors,
            fleet.mean(MINUTE_RANGE, "output_tokens_per_sec", now, RATE_POINTS),
            part,
            self._of_workers(part, now),
            _counted(self.history.take_unsent()),
        )

    def _of_workers(self, part: int, now: float) -> dict[int, WorkerFigures]:
        keyed = ((target_key(worker.url), worker) for worker in self._fleet.workers)
        due = islice((pair for pair in keyed if pair[0] % PARTS == part), MAX_WORKERS // PARTS)
        by_key = {key: self._of_worker(worker, now) for key, worker in due}
        return {key: figures for key, figures in by_key.items() if any(figures)}

    def _of_worker(self, worker: Worker, now: float) -> WorkerFigures:
        window = self._instruments.recent.worker_window(worker, now)
        track, tokens = self.history.workers.get(worker), None
        if track is not None:
            tokens = track.mean(MINUTE_RANGE, "output_tokens_per_sec", now, MINUTE_POINTS)
        return WorkerFigures(window.rate, window.errors, tokens or 0.0)

    def _dashboard(self, local_host: str) -> str:
        """The dashboard's URL for other machines; "" if it can't be determined.

        A listener on all addresses is shown with the address from which the store is reached.
        """
        url = self._view.served_at().dashboard
        scheme, _, rest = url.partition("://")
        host, _, port = rest.rpartition(":")
        if host in ANY_HOST:
            if not local_host:
                return ""
            host = f"[{local_host}]" if ":" in local_host else local_host
        return f"{scheme}://{host}:{port}/dashboard" if url else ""


def _counted(counts: Bin) -> CountedFigures:
    names = CountedFigures.__struct_fields__
    return CountedFigures(**{name: getattr(counts, name) for name in names})


class ProxyLoad:
    """See `shared_load.LoadView` and `shared_hints.HintsView`."""

    def __init__(
        self, manager: ProcessManager, view: AggregateView, config_store: ConfigStore
    ) -> None:
        self._manager = manager
        self._view = view
        self._config_store = config_store

    def recount(self) -> None:
        self._manager.count()

    @property
    def load(self) -> tuple[int, int]:
        return self._view.load

    @property
    def can_wait(self) -> bool:
        return self._config_store.config.server.queue_size > 0

    def set_peer_in_flight(self, total: int) -> None:
        self._manager.dataplane.inflight.elsewhere = total
        self._manager.count()

    def follow_cluster(self, *, member: bool) -> None:
        self._manager.worker_ids.follow_cluster(member=member)

    def share(self, target: Worker) -> None:
        self._manager.worker_ids.share_cluster_state(target)

    @property
    def hints(self) -> ClusterHints:
        return self._manager.dataplane.cluster_hints

    def receive_prefixes(self, hashes: dict[int, bytes]) -> None:
        self.hints.prefixes.add(hashes)
        for handle in self._manager.handles:
            handle.send(ClusterHintsCommand(hashes))

    def spread_prefixes(self, hashes: dict[int, bytes]) -> None:
        """Send hashes that one process has noted to all processes."""
        if self._manager.slots:
            self.receive_prefixes(hashes)

    def place_sessions(self, sessions: Mapping[bytes, int]) -> None:
        dataplane = self._manager.dataplane
        for digest, key in sessions.items():
            target = dataplane.cluster_hints.target(key)
            if target is not None or key == FINISHED:
                dataplane.place_session(digest, target)

    def confirm_sessions(self, sessions: Mapping[bytes, int]) -> None:
        """Place sessions again that this proxy placed: a message may have moved them since."""
        if self._manager.slots:
            self.place_sessions(sessions)

    def forget_cache(self, worker: Worker) -> None:
        self._manager.dataplane.forget_cache(worker)
        serial = self._manager.worker_ids.serial(worker)
        for handle in self._manager.handles:
            handle.send(ClearCacheCommand(serial))

    def room_made(self) -> None:
        self._manager.dataplane.queue.serve()


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
    firsts = {bucket: count for bucket, count in counted.firsts.items() if 0 <= bucket <= len(FINE)}
    gaps = {
        bucket: count
        for bucket, count in counted.gaps.items()
        if 0 <= bucket <= len(BETWEEN_CHUNKS)
    }
    return Bin(**asdict(counted) | {"firsts": firsts, "gaps": gaps})
