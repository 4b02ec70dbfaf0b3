"""Health hints: when a worker's health changes at one proxy, the others probe the worker.

Invariant: a hint changes no state. Only its own probes and requests determine a proxy's view of a
worker, so a proxy that is cut off from a worker does not remove it for the others. A hint is sent
when a worker leaves or returns to rotation at this proxy, and ignored if the receiver already has
the same state.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_proxy.cluster.messages import HealthMessage, encode
from omni_proxy.cluster_member.store_connection import RedisConnection
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.prober import Prober


class SharedHealth:
    """`table()`: the current [cluster]."""

    def __init__(self, fleet: Fleet, prober: Prober, table: Callable[[], ClusterConfig]) -> None:
        self._fleet = fleet
        self._prober = prober
        self._table = table
        self._changed: dict[str, bool] = {}  # by URL: whether it is healthy now
        fleet.watch_health(self._note)

    async def tick(self, connection: RedisConnection, member: str) -> None:
        """Publish changes. Raises StoreError."""
        if self._changed:
            changed, self._changed = self._changed, {}
            message = encode(HealthMessage(member, changed))
            await connection.call(("PUBLISH", f"{self._table().name}:members", message))

    def take(self, message: HealthMessage) -> None:
        for url, healthy in message.healthy.items() if self._shares else ():
            worker = self._fleet.find(url)
            if worker is not None and (worker.health.state is Health.HEALTHY) != healthy:
                self._prober.hasten(worker)

    def _note(self, worker: Worker, before: Health) -> None:
        now = worker.health.state
        # No hint for a worker that starts: each proxy probes it anyway.
        left, came_back = before is Health.HEALTHY, now is Health.HEALTHY
        if self._shares and (left or (came_back and before is not Health.UNKNOWN)):
            self._changed[worker.url] = came_back

    @property
    def _shares(self) -> bool:
        table = self._table()
        return table.enabled and "health" in table.share
