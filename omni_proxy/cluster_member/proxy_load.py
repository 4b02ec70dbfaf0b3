"""The requests of this proxy as a cluster's other members see them, in all its processes.

Invariant: the main process is the member. Requests of other proxies are counted in its row of the
shared counters, and its bounds stand there, so every data-plane process routes by them.
"""

from __future__ import annotations

from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.aggregate import AggregateView
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.runtime_config.config_store import ConfigStore


class ProxyLoad:
    """See `shared_load.LoadView`."""

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

    def room_made(self) -> None:
        self._manager.dataplane.queue.serve()
