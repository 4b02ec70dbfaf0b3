"""Requests that come while an operation on weights keeps out every worker that could take them.

Contract: asked only about a request that nobody can take, and only where that is the reason. What
[weight_sync] while_updating and [routing] while_paused say decides whether it may wait; since when
each worker is out is counted from the change of the fleet that showed it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from omni_proxy.config.schema import Config
from omni_proxy.fleet.worker import WEIGHT_CORDONS, Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import workers_held_for_update
from omni_proxy.wire.errors import HttpError

if TYPE_CHECKING:
    from omni_proxy.dataplane.dataplane import DataPlane


class UpdateGate:
    """What the door knows of workers that are held for their weights."""

    def __init__(self, door: DataPlane) -> None:
        self._door = door
        self._since: dict[Worker, float] = {}

    def update_presence(self) -> None:
        now, before = self._door.loop.now, self._since
        held = [
            worker for worker in self._door.fleet.workers if worker.cordon_reasons & WEIGHT_CORDONS
        ]
        self._since = {worker: before.get(worker, now) for worker in held}

    def follow(self, worker: Worker) -> None:
        """It alone has changed."""
        if worker.cordon_reasons & WEIGHT_CORDONS and self._door.fleet.find(worker.url) is worker:
            self._since.setdefault(worker, self._door.loop.now)
        else:
            self._since.pop(worker, None)

    def judge(self, need: Requirements, nobody: HttpError) -> None:
        """Raises `nobody` where the request may not wait; says in it for how long that has been."""
        door = self._door
        held = workers_held_for_update(door.fleet, need, door.voice_owner)
        since = [self._since[worker] for worker in held if worker in self._since]
        if since:
            nobody.message += f", for {door.loop.now - min(since):.0f} s so far"
        if held and all(_sheds(door.config, worker.cordon_reasons) for worker in held):
            raise nobody


def _sheds(config: Config, holds: Iterable[str]) -> bool:
    """Whoever is out for several reasons is back when the last of them ends."""
    updating, paused = config.weight_sync.while_updating, config.routing.while_paused
    # Where pausing keeps nobody out, "paused" stands only while the call itself is under way.
    ruled_by = {"paused": updating if paused == "pass" else paused}
    return any(ruled_by.get(hold, updating) == "shed" for hold in holds)
