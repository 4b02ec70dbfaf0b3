"""Decides whether a request waits while a weight operation cordons every worker that could take it,
or the worker of its session.

Contract: `check` is called only for a request that no worker can take for that reason.
[weight_sync] while_updating and [routing] while_paused decide whether it may wait. The time of a
cordon counts from the change of the fleet that reported it.
"""

from __future__ import annotations

from collections.abc import Iterable

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.settings import Settings
from omni_proxy.dataplane.upstream.balancer import Balancer
from omni_proxy.fleet.cordon_reasons import PAUSED, WEIGHT_CORDONS
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.sticky import HOLDING_CORDONS
from omni_proxy.wire.errors import HttpError


class UpdateGate:
    """The times since which workers are cordoned for their weights."""

    def __init__(
        self, loop: EventLoop, fleet: Fleet, settings: Settings, balancer: Balancer
    ) -> None:
        self._loop = loop
        self._fleet = fleet
        self._settings = settings
        self._balancer = balancer
        self._since: dict[Worker, float] = {}

    def on_fleet_change(self) -> None:
        now, before = self._loop.now, self._since
        cordoned = [
            worker for worker in self._fleet.workers if worker.cordon_reasons & WEIGHT_CORDONS
        ]
        self._since = {worker: before.get(worker, now) for worker in cordoned}

    def on_worker_change(self, worker: Worker) -> None:
        """As `on_fleet_change`, if only this worker has changed."""
        if worker.cordon_reasons & WEIGHT_CORDONS and self._fleet.find(worker.url) is worker:
            self._since.setdefault(worker, self._loop.now)
        else:
            self._since.pop(worker, None)

    def check(self, need: Requirements, error: HttpError) -> None:
        """Raise `error` if the request may not wait; its message gets the time since the cordon."""
        held_workers = self._balancer.held_for_update(need)
        since = [self._since[worker] for worker in held_workers if worker in self._since]
        if since:
            error.message += f", for {self._loop.now - min(since):.0f} s so far"
        if held_workers and all(
            _sheds(self._settings.config, worker.cordon_reasons) for worker in held_workers
        ):
            raise error


def reasons_to_hold_sessions(config: Config) -> frozenset[str]:
    """The cordon reasons of its worker for which a session waits rather than moves to another.
    Empty without a queue."""
    if not config.server.queue_size:
        return frozenset()
    return frozenset(reason for reason in HOLDING_CORDONS if not _sheds(config, (reason,)))


def _sheds(config: Config, holds: Iterable[str]) -> bool:
    """Whether any of these cordons is configured to shed. The worker returns after the last one."""
    updating, paused = config.weight_sync.while_updating, config.routing.while_paused
    # With while_paused = "pass" a worker has the cordon PAUSED only during the call itself.
    policy_by_cordon = {PAUSED: updating if paused == "pass" else paused}
    return any(policy_by_cordon.get(hold, updating) == "shed" for hold in holds)
