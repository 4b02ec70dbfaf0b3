"""Everything that has to do with versions that we hold ourselves, put together once.

Invariant: where [weight_sync] mode does not ask for it, nothing of it touches a disk, starts a
process or holds a worker back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import trio

from omni_proxy.config.schema import Config, WeightSyncConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.catchup import CatchUp
from omni_proxy.weight_sync.delivery.deliver import VersionRelay
from omni_proxy.weight_sync.delivery.over_network import GroupSends
from omni_proxy.weight_sync.delivery.prefetch import Prefetch
from omni_proxy.weight_sync.delivery.proxy_rank import ProxyRank
from omni_proxy.weight_sync.operations.rollback import RollbackSource
from omni_proxy.weight_sync.operations.runner import OperationContext
from omni_proxy.weight_sync.store import shm_cleanup
from omni_proxy.weight_sync.store.service import StoreService


class VersionService:
    """`folder`: where versions lie unless [weight_sync] store_dir says so; `busy` as in CatchUp."""

    def __init__(
        self, tools: OperationContext, folder: Path, busy: Callable[[Worker], bool]
    ) -> None:
        config_store = tools.config_store

        def settings() -> WeightSyncConfig:
            return config_store.config.weight_sync

        self.shelf = StoreService(settings, folder)
        self.own = ProxyRank(self.shelf, settings)
        self.relay = VersionRelay(self.shelf, GroupSends(settings, self.own.sender))
        self.ahead = Prefetch()
        self.source = RollbackSource(self.shelf, self.relay)
        self.catch_up = CatchUp(tools, self.shelf, self.relay, busy)
        self._settings = settings
        self._nursery: trio.Nursery | None = None
        config_store.subscribe(self._follow_config)

    @property
    def on(self) -> bool:
        """Whether a rank of our own takes part in the groups of trainers."""
        return self.shelf.wanted

    @property
    def relays(self) -> bool:
        """Whether it is the only one of ours, so that every worker gets a version from us."""
        return self._settings().mode == "receive"

    def ranks_behind(self, of_workers: int) -> int:
        """How many ranks of a trainer's group this endpoint has, with workers of so many."""
        return ProxyRank.ranks if self.relays else of_workers + ProxyRank.ranks * self.on

    def read_ahead(self, workers: Sequence[Worker], headers: Mapping[str, str]) -> None:
        """What was just armed will be given to them: who is near may begin before all is there."""
        if self.relays and self.own.coming is not None:
            self.ahead.begin(self.own.coming, workers, headers)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until it is cancelled; the versions of before are known once it has started."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = self.catch_up.nursery = self.ahead.nursery = nursery
                await nursery.start(self.shelf.run)
                if self.on:
                    nursery.start_soon(self.own.warm)
                self.catch_up.all_soon()
                task_status.started()
                if self.on:
                    await self.shelf.in_thread(shm_cleanup.sweep)
                await trio.sleep_forever()
        finally:
            self._nursery = self.catch_up.nursery = self.ahead.nursery = None
            await self.own.close()

    def status(self) -> dict[str, object]:
        """JSON-ready, for whoever asks how the weights stand."""
        current = self.shelf.current
        store = self.shelf.store
        return {
            "store": str(store.folder) if store is not None else None,
            "versions": len(self.shelf.versions()),
            "current": current.number if current is not None else None,
            "error": self.shelf.error or None,
            "caught_up": self.catch_up.caught_up,
            "not_caught_up": self.catch_up.failed,
        }

    def _follow_config(self, old: Config, new: Config) -> None:
        self.shelf.poke()
        if old.weight_sync.mode != new.weight_sync.mode and self._nursery is not None:
            self._nursery.start_soon(self.own.warm if self.on else self.own.rest)
