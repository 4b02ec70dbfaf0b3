"""The requests of this proxy as a cluster's other members see them, in all its processes.

Invariant: the main process is the member. Requests of other proxies are counted in its row of the
shared counters, and its bounds stand there, so every data-plane process routes by them.
"""

from __future__ import annotations

from collections.abc import Mapping

from omni_proxy.cluster.session_places import FINISHED
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.aggregate import AggregateView
from omni_proxy.multiprocess.ipc import ClearCacheCommand, ClusterHintsCommand
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.routing.cluster_hints import ClusterHints
from omni_proxy.runtime_config.config_store import ConfigStore


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

    def set_elsewhere(self, total: int) -> None:
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
        """Of one of its processes, to all of them."""
        if self._manager.slots:
            self.receive_prefixes(hashes)

    def place_sessions(self, sessions: Mapping[bytes, int]) -> None:
        dataplane = self._manager.dataplane
        for digest, key in sessions.items():
            target = dataplane.cluster_hints.target(key)
            if target is not None or key == FINISHED:
                dataplane.place_session(digest, target)

    def confirm_sessions(self, sessions: Mapping[bytes, int]) -> None:
        """Of its processes, which did not know of what was heard meanwhile."""
        if self._manager.slots:
            self.place_sessions(sessions)

    def forget_cache(self, worker: Worker) -> None:
        self._manager.dataplane.forget_cache(worker)
        serial = self._manager.worker_ids.serial(worker)
        for handle in self._manager.handles:
            handle.send(ClearCacheCommand(serial))

    def room_made(self) -> None:
        self._manager.dataplane.queue.serve()
