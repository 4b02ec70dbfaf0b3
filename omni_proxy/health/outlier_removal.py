"""Outlier ejection with `eject = "remove"`: removes workers whose requests keep failing.

Invariant: the removal is that of `DELETE`, through the configuration store, so a worker that the
file names stays away until its entry changes. A worker that recovered or was replaced in between
is not removed.
"""

from __future__ import annotations

import logging

import trio

from omni_proxy.config.overlay import SavedState, with_deleted
from omni_proxy.config.schema import Config
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)


class OutlierRemoval:
    """Removes ejected workers. The fleet reports an ejection during a request, where nothing may
    wait, so `run` makes the removal."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._queue: list[Worker] = []
        self._queued = trio.Event()
        fleet.watch_ejected(self._enqueue)

    def _enqueue(self, worker: Worker) -> None:
        if self._config_store.config.routing.eject == "remove":
            self._queue.append(worker)
            self._queued.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            while self._queue:
                await trio.lowlevel.checkpoint()  # `_remove` may queue the worker again
                await self._remove(self._queue.pop(0))
            self._queued = trio.Event()
            await self._queued.wait()

    async def _remove(self, worker: Worker) -> None:
        def edit(state: SavedState, config: Config) -> SavedState:
            if self._fleet.find(worker.url) is not worker or worker.health.state is Health.HEALTHY:
                return state
            return with_deleted(state, config, worker.url)

        error = worker.health.last_error
        await self._config_store.membership_lock.wait_released()
        try:
            changed = await self._config_store.change(edit, own=False)
        except HttpError:  # a weight sync has started: remove the worker after it
            self._queue.append(worker)
            return
        if changed.outcome == "applied":
            _log.warning(
                "worker_removed worker=%s reason=failed_requests error=%s", worker.url, error
            )
        elif changed.error is not None:
            _log.error("worker_remove_failed worker=%s error=%s", worker.url, changed.error)
