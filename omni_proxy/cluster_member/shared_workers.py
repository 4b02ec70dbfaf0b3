"""Shares changes of workers over HTTP (added, changed, drained, deleted), and health hints.

Invariants: a change of another proxy is saved here as a change over HTTP, but not published again.
A change that is made while the store can't be reached is published later. Of two changes of a
worker the one with the higher revision of the store wins, at all proxies. A health hint changes no
state: when a worker leaves or returns to rotation at one proxy, the others probe it, and each
decides by its own probes and requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from omni_proxy.cluster.messages import HealthMessage, WorkerMessage, encode
from omni_proxy.cluster.worker_changes import (
    PUT,
    WorkerChange,
    changes_between,
    decode_change,
    encode_change,
    split_stored,
    with_change,
)
from omni_proxy.cluster_member.store_connection import RedisConnection
from omni_proxy.config.schema import Config
from omni_proxy.config.state import SavedState
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.prober import Prober
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.worker_drain import WorkerDrains
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)

RETRY_SECS: Final = 1.0  # while a weight sync holds the membership lock


class SharedWorkers:
    """`table()`: the current [cluster]."""

    def __init__(
        self, config_store: ConfigStore, drains: WorkerDrains, table: Callable[[], ClusterConfig]
    ) -> None:
        self._config_store = config_store
        self._drains = drains
        self._table = table
        self._revisions: dict[str, int] = {}  # newest known revision, by URL
        self._unpublished: dict[str, WorkerChange] = {}
        self._incoming: dict[str, WorkerChange] = {}
        self._arrived = trio.Event()
        config_store.on_change = self._note

    async def run(self) -> None:
        """Apply changes of others, until cancelled."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self._incoming:
                await self._arrived.wait()
                self._arrived = trio.Event()
            changes, self._incoming = self._incoming, {}
            if changes and not await self._apply(changes):
                self._incoming = changes | self._incoming
                await trio.sleep(RETRY_SECS)

    async def connect(self, connection: RedisConnection) -> None:
        """Read the store's changes; queue own ones that it lacks. Raises StoreError."""
        if not self._shares:
            return
        (stored,) = await connection.call(("HGETALL", self._changes_key))
        changes = stored if isinstance(stored, dict) else {}
        urls = set()
        for name, value in changes.items():
            revision, change = split_stored(value)
            url = name.decode(errors="replace")
            urls.add(url)
            if change is not None and self._revisions.get(url) != revision:
                self._revisions[url] = revision
                if url not in self._unpublished:
                    self._receive(change)
        for change in changes_between(SavedState(), self._config_store.state):
            if change.url not in urls:
                self._unpublished.setdefault(change.url, change)

    async def tick(self, connection: RedisConnection, member: str) -> None:
        """Publish own changes. If it raises StoreError, the rest is published later."""
        while self._unpublished and self._shares:
            url, change = next(iter(self._unpublished.items()))
            (revision,) = await connection.call(("INCR", self._revision_key))
            payload = encode_change(change)
            message = encode(WorkerMessage(member, int(revision), payload))
            await connection.call(
                ("EVAL", PUT, 1, self._changes_key, url, int(revision), payload,
                 f"{self._table().name}:members", message)
            )  # fmt: skip
            self._revisions[url] = max(int(revision), self._revisions.get(url, 0))
            if self._unpublished.get(url) is change:
                del self._unpublished[url]

    def take(self, message: WorkerMessage) -> None:
        if not self._shares:
            return
        change = decode_change(message.change)
        if change is None:
            _log.warning("cluster_workers_unreadable member=%s", message.member[:200])
            return
        if message.revision > self._revisions.get(change.url, 0):
            self._revisions[change.url] = message.revision
            self._receive(change)

    def _receive(self, change: WorkerChange) -> None:
        self._incoming[change.url] = change
        self._arrived.set()

    def _note(self, before: SavedState, after: SavedState) -> None:
        if self._shares:
            for change in changes_between(before, after):
                self._unpublished[change.url] = change

    async def _apply(self, changes: dict[str, WorkerChange]) -> bool:
        """Apply changes. Returns False if they have to be retried."""

        def edit(state: SavedState, _: Config) -> SavedState:
            for change in changes.values():
                state = with_change(state, change)
            return state

        try:
            result = await self._config_store.change(edit, own=False)
        except HttpError as error:
            _log.warning(
                "cluster_workers_deferred reason=%s was=cluster_workers_wait", error.message
            )
            return False
        if result.error is not None:
            _log.error("cluster_workers_refused urls=%s error=%s", ",".join(changes), result.error)
        elif result.outcome == "applied":
            _log.info("cluster_workers_changed urls=%s", ",".join(changes))
        self._drains.resume_removals()
        return True

    @property
    def _shares(self) -> bool:
        table = self._table()
        return table.enabled and "workers" in table.share

    @property
    def _changes_key(self) -> str:
        return f"{self._table().name}:workers"

    @property
    def _revision_key(self) -> str:
        return f"{self._table().name}:workers-revision"


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
                self._prober.probe_now(worker)

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
