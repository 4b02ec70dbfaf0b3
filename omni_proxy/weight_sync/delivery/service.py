"""Weight versions that the proxy keeps: store, proxy rank, delivery, prefetch, catch-up.

Invariant: unless [weight_sync] mode enables them, none of them accesses the disk, starts a process
or cordons a worker, except catch-up after a rollout from a path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import trio

from omni_proxy.config.schema import Config, WeightSyncConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.catchup import CatchUp
from omni_proxy.weight_sync.delivery.deliver import ProcessGroupSender, VersionDeliverer
from omni_proxy.weight_sync.delivery.prefetch import Prefetch
from omni_proxy.weight_sync.delivery.proxy_rank import ProxyRank
from omni_proxy.weight_sync.state_journal import OperationContext
from omni_proxy.weight_sync.store import recovery
from omni_proxy.weight_sync.store.service import StoreService


class VersionService:
    """Creates and runs these parts. `busy`: as in CatchUp.

    `folder`: has the versions if [weight_sync] store_dir is not set.
    """

    def __init__(
        self, context: OperationContext, folder: Path, busy: Callable[[Worker], bool]
    ) -> None:
        config_store = context.config_store

        def settings() -> WeightSyncConfig:
            return config_store.config.weight_sync

        self.store_service = StoreService(settings, folder)
        self.proxy_rank = ProxyRank(self.store_service, settings)
        sender = ProcessGroupSender(settings, self.proxy_rank.open_sender)
        self.deliverer = VersionDeliverer(self.store_service, sender)
        self.prefetch = Prefetch()
        self.catch_up = CatchUp(context, self.store_service, self.deliverer, busy)
        self._settings = settings
        self._nursery: trio.Nursery | None = None
        config_store.subscribe(self._on_config_change)

    @property
    def is_enabled(self) -> bool:
        """Whether a rank of the proxy joins the groups of trainers."""
        return self.store_service.enabled

    @property
    def delivers_to_all(self) -> bool:
        """Whether only the proxy's rank joins, so that all workers get versions from the proxy."""
        return self._settings().mode == "receive"

    def rank_count(self, worker_ranks: int) -> int:
        """Rank count of this endpoint in a trainer's group; `worker_ranks`: of its workers."""
        if self.delivers_to_all:
            return ProxyRank.rank_count
        return worker_ranks + ProxyRank.rank_count * self.is_enabled

    def start_prefetch(self, workers: Sequence[Worker], headers: Mapping[str, str]) -> None:
        """Let workers on this machine read the version that was just armed while it arrives."""
        if self.delivers_to_all and self.proxy_rank.incoming is not None:
            self.prefetch.begin(self.proxy_rank.incoming, workers, headers)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Started means that the store's versions have been listed."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = self.catch_up.nursery = self.prefetch.nursery = nursery
                await nursery.start(self.store_service.run)
                if self.is_enabled:
                    nursery.start_soon(self.proxy_rank.warm_up)
                self.catch_up.start_all()
                task_status.started()
                try:
                    if self.is_enabled:
                        await self.store_service.run_in_thread(recovery.remove_stale_folders)
                    await trio.sleep_forever()
                finally:  # inside the nursery's block: no task may be started while it closes
                    self._nursery = self.catch_up.nursery = self.prefetch.nursery = None
        finally:
            await self.proxy_rank.close()

    def status(self) -> dict[str, object]:
        """JSON-ready: `store` in GET /weights."""
        current = self.store_service.current
        store = self.store_service.store
        return {
            "store": str(store.folder) if store is not None else None,
            "versions": len(self.store_service.versions()),
            "current": current.number if current is not None else None,
            "error": self.store_service.error or None,
            "caught_up": self.catch_up.caught_up,
            "not_caught_up": self.catch_up.failed,
        }

    def _on_config_change(self, old: Config, new: Config) -> None:
        self.store_service.wake()
        if old.weight_sync.mode != new.weight_sync.mode and self._nursery is not None:
            rank = self.proxy_rank
            self._nursery.start_soon(rank.warm_up if self.is_enabled else rank.close_when_unused)
