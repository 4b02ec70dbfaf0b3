"""Discovery: one watcher for each `[[discover]]`; applies the workers that they find to the fleet.

Invariant: a worker that may get no new requests is cordoned immediately, without waiting for a
lock; workers join and leave the fleet through the configuration store, like all changes of it. Only
workers that discovery added are ever changed, and a worker leaves when its requests have ended, at
the latest after `drain_timeout_secs`. The watchers run in `run`'s nursery.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from omni_proxy.config.overlay import FoundWorker
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.discovery.endpoints import (
    DiscoveryState,
    SourceEndpoint,
    SourceEndpoints,
    SourceReport,
    combine,
    count_states,
)
from omni_proxy.discovery_watch.api_connection import ClusterAccess
from omni_proxy.discovery_watch.dns_watcher import DnsWatcher
from omni_proxy.discovery_watch.kubernetes_watcher import KubernetesWatcher
from omni_proxy.fleet.cordon_reasons import DISCOVERY_CORDONS, LEAVING_CORDON, NOT_READY_CORDON
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore

_log = logging.getLogger(__name__)

GONE: Final = "it is no longer found"
APPLY_PAUSE_SECS: Final = 0.1  # changes of the fleet are collected for this time
DRAIN_POLL_SECS: Final = 0.05
MAX_NEW: Final = 16  # workers that join in one turn of the event loop, since each takes time

Access = Callable[[DiscoverEntry], ClusterAccess]


@dataclass(slots=True, eq=False)
class _Source:
    entry: DiscoverEntry
    watcher: KubernetesWatcher | DnsWatcher
    scope: trio.CancelScope

    @property
    def endpoints(self) -> SourceEndpoints:
        return self.watcher.state.endpoints


class Discovery:
    """The service. `jitter` returns a number from 0 to 1; `access` is replaced in tests."""

    def __init__(
        self,
        fleet: Fleet,
        config_store: ConfigStore,
        jitter: Callable[[], float],
        access: Access = ClusterAccess,
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._jitter = jitter
        self._access = access
        self._sources: dict[str, _Source] = {}  # in the order of the configuration
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        self._leaving = trio.Event()
        self._joined: set[tuple[str, str]] = set()  # uid and URL
        config_store.subscribe(self._follow_config)
        fleet.watch_members(self._cordon_all)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for source in self._sources.values():  # sources from before a service restart
                    self._start(source)
                self._follow_entries(self._config_store.config.discover)
                nursery.start_soon(self._end_drains)
                task_status.started()
                await self._apply_changes()
        finally:
            self._nursery = None

    def reports(self) -> list[SourceReport]:
        return [
            SourceReport(
                source.watcher.status,
                count_states(source.endpoints),
                dict(source.watcher.state.problems),
            )
            for source in self._sources.values()
        ]

    def unlisted_sources(self) -> list[str]:
        """The sources that have provided no list so far, each with the reason if it is known."""
        statuses = (source.watcher.status for source in self._sources.values())
        return [
            f"{status.name} ({status.error})" if status.error else status.name
            for status in statuses
            if status.listed_at is None
        ]

    def reason(self, worker: Worker) -> str:
        """Why discovery cordons the worker; "" if it does not."""
        if worker.cordon_reasons.isdisjoint(DISCOVERY_CORDONS):
            return ""
        endpoint = self._endpoint(worker)
        return (endpoint.reason if endpoint is not None else "") or GONE

    def _follow_config(self, old: Config, new: Config) -> None:
        if self._nursery is not None and old.discover != new.discover:
            self._follow_entries(new.discover)

    def _follow_entries(self, entries: tuple[DiscoverEntry, ...]) -> None:
        """Run a watcher for each entry; that of a changed entry takes over its workers."""
        before, self._sources = self._sources, {}
        for entry in entries:
            known = before.pop(entry.name, None)
            if known is not None and known.entry == entry:
                self._sources[entry.name] = known
                continue
            source = _Source(entry, self._watcher(entry), trio.CancelScope())
            if known is not None:
                known.scope.cancel()
                source.watcher.state.endpoints = known.endpoints
            self._sources[entry.name] = source
            self._start(source)
        for source in before.values():
            source.scope.cancel()
        self._changed.set()

    def _watcher(self, entry: DiscoverEntry) -> KubernetesWatcher | DnsWatcher:
        def on_change(changed: list[SourceEndpoint]) -> None:
            self._note(entry.name, changed)

        if entry.kind == "dns":
            return DnsWatcher(entry, on_change)
        return KubernetesWatcher(entry, self._access(entry), on_change, self._jitter)

    def _start(self, source: _Source) -> None:
        assert self._nursery is not None
        source.scope = trio.CancelScope()

        async def run() -> None:
            with source.scope:
                await source.watcher.run()

        self._nursery.start_soon(run)

    def _note(self, name: str, changed: list[SourceEndpoint]) -> None:
        """Process changes of a source: cordon immediately, and wake the tasks for the rest."""
        for endpoint in changed:
            self._log_change(name, endpoint)
            worker = self._fleet.find(endpoint.url)
            if worker is not None and self._endpoint(worker) is endpoint:
                self._cordon(worker, endpoint)
            if endpoint.state is DiscoveryState.LEAVING:
                self._leaving.set()
        if changed:
            self._changed.set()

    def _log_change(self, name: str, endpoint: SourceEndpoint) -> None:
        pod, url = endpoint.found.discovered.pod or "none", endpoint.url
        if endpoint.state is DiscoveryState.OPEN:
            known = self._fleet.find(endpoint.url) is not None
            state = "ready" if known else "found"
            _log.info("worker_%s worker=%s source=%s pod=%s", state, url, name, pod)
        else:
            state = endpoint.state.value
            _log.info(
                "worker_%s worker=%s source=%s pod=%s reason=%s",
                state, url, name, pod, endpoint.reason,
            )  # fmt: skip

    def _endpoint(self, worker: Worker) -> SourceEndpoint | None:
        """The worker's endpoint in its source, if it has one."""
        discovered = worker.discovered
        source = self._sources.get(discovered.source) if discovered is not None else None
        return source.endpoints.get(discovered.uid, worker.url) if source and discovered else None

    def _cordon(self, worker: Worker, endpoint: SourceEndpoint | None) -> None:
        leaves = endpoint is None or endpoint.state is DiscoveryState.LEAVING
        wanted = LEAVING_CORDON if leaves else NOT_READY_CORDON
        if leaves or (endpoint is not None and endpoint.state is DiscoveryState.NOT_READY):
            if wanted not in worker.cordon_reasons:
                self._fleet.cordon(worker, wanted)
        else:
            wanted = ""
        for reason in worker.cordon_reasons & DISCOVERY_CORDONS - {wanted}:
            self._fleet.uncordon(worker, reason)

    def _cordon_all(self) -> None:
        """Update all cordons after a change of the fleet: a worker may have changed its source."""
        for worker in self._fleet.workers:
            if worker.discovered is not None:
                self._cordon(worker, self._endpoint(worker))
            else:
                for reason in worker.cordon_reasons & DISCOVERY_CORDONS:
                    self._fleet.uncordon(worker, reason)

    async def _apply_changes(self) -> None:
        """Apply found workers to the fleet, step by step."""
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await self._config_store.follow_found(self._next_found)
            await trio.sleep(APPLY_PAUSE_SECS)

    def _next_found(self) -> tuple[FoundWorker, ...]:
        """All found workers, with at most MAX_NEW that were not in the fleet before."""
        workers = combine(source.endpoints for source in self._sources.values())
        keys = [(worker.discovered.uid, worker.entry.url) for worker in workers]
        later = {key for key in keys if key not in self._joined}
        for key in [key for key in keys if key in later][:MAX_NEW]:
            later.discard(key)
        self._joined = {*keys} - later
        if not later:
            return workers
        self._changed.set()
        return tuple(worker for worker, key in zip(workers, keys, strict=True) if key not in later)

    async def _end_drains(self) -> None:
        """Remove leaving workers when they are idle, or their drain timeout has passed."""
        while True:
            self._leaving = trio.Event()
            while leaving := [
                (source, endpoint)
                for source in self._sources.values()
                for endpoint in source.endpoints.leaving()
            ]:
                await self._fleet.await_replicated()  # before it, a process may still send to them
                for source, endpoint in leaving:
                    self._end_drain(source, endpoint)
                await trio.sleep(DRAIN_POLL_SECS)
            await self._leaving.wait()

    def _end_drain(self, source: _Source, endpoint: SourceEndpoint) -> None:
        worker = self._fleet.find(endpoint.url)
        if endpoint.state is not DiscoveryState.LEAVING:
            return  # it was found again since
        if worker is not None and self._endpoint(worker) is endpoint and worker.in_flight:
            if (
                trio.current_time()
                < endpoint.since + self._config_store.config.server.drain_timeout_secs
            ):
                return
            in_flight = worker.in_flight
            _log.warning("worker_drain_overdue worker=%s in_flight=%d", worker.url, in_flight)
        source.endpoints.forget(endpoint)
        self._changed.set()
