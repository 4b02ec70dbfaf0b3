"""The ejector: takes workers out of the registry whose requests keep failing, `eject = "remove"`.

Invariant: it goes the way of DELETE, through the keeper, so a worker that the file names stays away
until its entry changes. One that came back meanwhile, or was replaced, is left alone.
"""

from __future__ import annotations

import logging

import trio

from omni_proxy.config.overlay import SavedState, with_deleted
from omni_proxy.config.schema import Config
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)


class OutlierEjector:
    """The fleet tells it in the middle of a request; `run` does what takes time."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._ejected: list[Worker] = []
        self._more = trio.Event()
        fleet.watch_ejected(self._note)

    def _note(self, worker: Worker) -> None:
        if self._config_store.config.routing.eject == "remove":
            self._ejected.append(worker)
            self._more.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            while self._ejected:
                await trio.lowlevel.checkpoint()  # it may put back what it was given
                await self._remove(self._ejected.pop(0))
            self._more = trio.Event()
            await self._more.wait()

    async def _remove(self, worker: Worker) -> None:
        def edit(state: SavedState, config: Config) -> SavedState:
            known = self._fleet.find(worker.url) is worker
            if not known or worker.health.state is Health.HEALTHY:
                return state
            return with_deleted(state, config, worker.url)

        why = worker.health.last_error
        await self._config_store.membership_lock.wait_released()
        try:
            changed = await self._config_store.change(edit)
        except HttpError:  # a sync began in between: then after that one
            self._ejected.append(worker)
            return
        if changed.outcome == "applied":
            _log.warning("worker %s was removed: its requests keep failing: %s", worker.url, why)
        elif changed.error is not None:
            _log.error("worker %s could not be removed: %s", worker.url, changed.error)
