"""The launcher: runs the replicas of every [[launch]] entry, as many and as the configuration says.

Invariant: there is one place per (entry name, index) whose worker is in the fleet: one that was
removed over HTTP has no process that would hold its GPU unseen, and has one again when it is added
again or its entry changes. A changed command replaces the ready places
of an entry one after another, the next when the one before is ready: a broken command costs one.
The workers belong to the keeper; here they are only found, by URL.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import trio

from omni_proxy.config.schema import LaunchEntry
from omni_proxy.fleet.registry import Fleet
from omni_proxy.health.prober import Prober
from omni_proxy.launch.child_process import ParentDeathGuard
from omni_proxy.launch.gpu_allocator import GpuAllocator, visible
from omni_proxy.launch.replica_process import ReplicaProcess, ReplicaState
from omni_proxy.launch.worker_link import LaunchedWorkerLink
from omni_proxy.runtime_config.config_store import ConfigStore

Place = tuple[str, int]


class Launcher:
    """Owns the processes; `run` may be called again after it failed."""

    def __init__(
        self,
        fleet: Fleet,
        config_store: ConfigStore,
        prober: Prober,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._prober = prober
        self._chance = chance
        self._places: dict[Place, ReplicaProcess] = {}
        self._moved = trio.Event()
        self._told = trio.Event()
        config_store.subscribe(lambda _old, _new: self._wake())
        fleet.watch_members(self._wake)

    def status(self) -> list[dict[str, object]]:
        return [place.status() for _, place in sorted(self._places.items())]

    async def until_moved(self) -> None:
        """Until some place has another state than now."""
        await self._told.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        leash = ParentDeathGuard()
        standing = LaunchedWorkerLink(self._fleet, self._config_store, self._prober, self._wake)
        gpus = GpuAllocator(visible(os.environ))
        await leash.attach()
        try:
            async with standing, trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    self._moved = trio.Event()
                    for key, entry in self._settle():
                        place = ReplicaProcess(entry, key[1], standing, leash, gpus)
                        self._places[key] = place
                        nursery.start_soon(self._keep, key, place)
                    await self._moved.wait()
        finally:
            await leash.detach()

    async def _keep(self, key: Place, place: ReplicaProcess) -> None:
        try:
            await place.run(self._chance)
        finally:
            del self._places[key]
            self._wake()

    def _settle(self) -> list[tuple[Place, LaunchEntry]]:
        """Tell every place what is wanted of it; returns what has no place yet."""
        entries = self._config_store.config.launch
        wanted = {
            (entry.name, i): entry
            for entry in entries
            for i, url in enumerate(entry.urls)
            if self._fleet.find(url) is not None
        }
        for key, place in self._places.items():
            if key in wanted:
                place.entry = wanted[key]
            else:
                place.retire()
        for entry in entries:
            _renew([place for place in self._places.values() if place.name == entry.name])
        return [(key, entry) for key, entry in wanted.items() if key not in self._places]

    def _wake(self) -> None:
        self._moved.set()
        # One of its own: `run` may be between two lives, and would leave the other one set.
        told, self._told = self._told, trio.Event()
        told.set()


def _renew(places: list[ReplicaProcess]) -> None:
    """Renew what serves nobody at once, and at most one of those that serve."""
    busy = any(p.called or not (p.outdated or p.state is ReplicaState.READY) for p in places)
    for place in places:
        if place.outdated and not place.called and not (place.serving and busy):
            busy |= place.serving
            place.renew()
