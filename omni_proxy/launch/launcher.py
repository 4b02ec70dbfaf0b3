"""The launcher: runs the configured number of replicas of every [[launch]] entry, and prints their
progress on the terminal.

Invariant: there is one `ReplicaProcess` per (entry name, index) whose worker is in the fleet. A
replica that was removed over HTTP has no process and therefore no GPU; it is started again when it
is added again or its entry changes. A changed command restarts the ready replicas of an entry one
after another, each when the previous one is ready, so a broken command takes down only one replica.
The configuration store owns the workers; the launcher finds them by URL.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import trio

from omni_proxy.config.schema import LaunchEntry
from omni_proxy.fleet.registry import Fleet
from omni_proxy.health.prober import Prober
from omni_proxy.launch.child_process import HandedReplica, ParentDeathGuard
from omni_proxy.launch.gpu_allocator import GpuAllocator, visible_gpus
from omni_proxy.launch.replica_process import ReplicaProcess, ReplicaState
from omni_proxy.launch.worker_link import LaunchedWorkerLink
from omni_proxy.runtime_config.config_store import ConfigStore

ReplicaKey = tuple[str, int]  # name of the entry, index of the replica


class Launcher:
    """Owns the processes; `run` may be called again after it failed."""

    def __init__(
        self,
        fleet: Fleet,
        config_store: ConfigStore,
        prober: Prober,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._prober = prober
        self._jitter = jitter
        self._replicas: dict[ReplicaKey, ReplicaProcess] = {}
        self._handed: dict[ReplicaKey, HandedReplica] = {}  # to be taken over by `run`
        self._released = False  # another program has the replicas
        self._changed = trio.Event()
        self._state_changed = trio.Event()
        config_store.subscribe(lambda _old, _new: self._wake())
        fleet.watch_members(self._wake)

    def status(self) -> list[dict[str, object]]:
        return [replica.status() for _, replica in sorted(self._replicas.items())]

    def adopt(self, replicas: Iterable[HandedReplica]) -> None:
        """Take over replicas of another program, before `run`; or own replicas that were released
        to a program that has failed."""
        self._released = False
        self._handed = {
            (replica.record.name, replica.record.index): replica for replica in replicas
        }

    async def end_handed(self) -> None:
        """End the replicas of `adopt` that `run` has not taken over. Can't be cancelled."""
        handed, self._handed = self._handed, {}
        if not handed:
            return
        guard = ParentDeathGuard()  # not attached: this program ends only after the replicas
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for replica in handed.values():
                    nursery.start_soon(_end_handed, guard, replica)

    def hand_over(self) -> list[HandedReplica]:
        """All running processes, for another program. Raises OSError."""
        handed = [replica.hand_over() for replica in self._replicas.values()]
        return [replica for replica in handed if replica is not None]

    def release(self, pids: Collection[int]) -> None:
        """Another program has these processes: `run` does not end them when it ends."""
        self._released = True
        for replica in self._replicas.values():
            replica.release(pids)

    async def wait_state_change(self) -> None:
        """Wait until a replica enters another state."""
        await self._state_changed.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        guard = ParentDeathGuard()
        link = LaunchedWorkerLink(self._fleet, self._config_store, self._prober, self._wake)
        gpus = GpuAllocator(visible_gpus(os.environ))
        await guard.attach()
        try:
            async with link, trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    self._changed = trio.Event()
                    for key, entry in self._reconcile():
                        replica = ReplicaProcess(entry, key[1], link, guard, gpus)
                        self._replicas[key] = replica
                        if key in self._handed:
                            replica.adopt(self._handed.pop(key))
                        nursery.start_soon(self._run_replica, key, replica)
                    unwanted, self._handed = self._handed, {}  # their entries were removed
                    for handed in unwanted.values():
                        nursery.start_soon(_end_handed, guard, handed)
                    await self._changed.wait()
        finally:
            if self._released:
                await guard.release_all()
            await guard.detach()

    async def _run_replica(self, key: ReplicaKey, replica: ReplicaProcess) -> None:
        try:
            await replica.run(self._jitter)
        finally:
            del self._replicas[key]
            self._wake()

    def _reconcile(self) -> list[tuple[ReplicaKey, LaunchEntry]]:
        """Update, retire and restart the running replicas; returns those that must be started."""
        entries = self._config_store.config.launch
        desired = {
            (entry.name, i): entry
            for entry in entries
            for i, url in enumerate(entry.urls)
            if self._fleet.find(url) is not None
        }
        for key, replica in self._replicas.items():
            if key in desired:
                replica.entry = desired[key]
            else:
                replica.retire()
        for entry in entries:
            _restart_outdated([r for r in self._replicas.values() if r.name == entry.name])
        return [(key, entry) for key, entry in desired.items() if key not in self._replicas]

    def _wake(self) -> None:
        self._changed.set()
        # Renewed here and not by `run`: between two runs the event would stay set.
        event, self._state_changed = self._state_changed, trio.Event()
        event.set()


async def _end_handed(guard: ParentDeathGuard, handed: HandedReplica) -> None:
    with trio.CancelScope(shield=True), suppress(OSError):  # `adopt` has already ended it
        child = await guard.adopt(handed, lambda _: None)
        await child.stop()


def _restart_outdated(replicas: list[ReplicaProcess]) -> None:
    """Restart all outdated replicas that don't serve, and at most one of those that serve."""
    busy = any(r.ending or not (r.outdated or r.state is ReplicaState.READY) for r in replicas)
    for replica in replicas:
        if replica.outdated and not replica.ending and not (replica.serving and busy):
            busy |= replica.serving
            replica.restart()


GRACE_SECS: Final = 1.0  # the timeout of each replica ends first, and has a better reason
MAX_ATTEMPTS: Final = 5  # of each replica, with about 15 s of delays in total

ReplicaStatus = Mapping[str, object]  # a row of `ReplicaProcess.status`
GetStatus = Callable[[], Sequence[ReplicaStatus]]


async def wait_until_ready(
    status: GetStatus,
    wait_change: Callable[[], Awaitable[None]],
    print_line: Callable[[str], None],
    startup_secs: float = math.inf,
) -> str:
    """Wait until every replica of `status` is ready; returns "".

    `wait_change` returns when a replica has changed. Returns a reason instead if no replica was
    ever ready, and either all have failed (`_has_failed`) or `startup_secs` have passed.
    """
    started_at = trio.current_time()
    reporter = _Reporter(print_line)
    count = len(status())
    print_line(f"starting {count} replica{'' if count == 1 else 's'}")
    while True:
        replicas = status()
        for replica in replicas:
            reporter.report(replica, len(replicas), trio.current_time() - started_at)
        if all(r["state"] == "ready" or _is_given_up(r) for r in replicas):
            return ""
        remaining_secs = startup_secs + GRACE_SECS - (trio.current_time() - started_at)
        if reporter.any_was_ready:
            remaining_secs = math.inf
        elif reporter.failed.issuperset(replica["url"] for replica in replicas):
            return "no replica can be started"
        elif remaining_secs <= 0:
            return f"no replica was ready within {startup_secs:g} s"
        with trio.move_on_after(remaining_secs):
            await wait_change()


class _Reporter:
    """Prints changes of each replica's state."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self.any_was_ready = False
        self.failed: set[object] = set()  # URLs
        self._print_line = print_line
        self._ready: set[object] = set()
        self._reported_errors: dict[object, object] = {}

    def report(self, replica: ReplicaStatus, count: int, secs: float) -> None:
        url, error = replica["url"], replica["last_error"]
        if replica["state"] == "ready":
            if url not in self._ready:
                self._ready.add(url)
                self.failed.discard(url)
                self.any_was_ready = True
                ready = len(self._ready)
                self._print_line(f"replica {ready} of {count} is ready after {secs:.1f} s: {url}")
            return
        self._ready.discard(url)
        if _has_failed(replica):
            self.failed.add(url)
        if error and self._reported_errors.get(url) != error:
            self._reported_errors[url] = error
            may_retry = self.any_was_ready or url not in self.failed
            note = _retry_note(replica, may_retry=may_retry)
            self._print_line(f"replica {url} is not ready: {error}; {note}")


def _has_failed(replica: ReplicaStatus) -> bool:
    """Whether the failure is permanent, or has occurred often enough."""
    if replica["state"] != "backing_off" or not replica["last_error"]:
        return False
    restarts = replica.get("restarts", 0)
    attempts = restarts + 1 if isinstance(restarts, int) else 1
    return bool(replica.get("fatal")) or attempts >= MAX_ATTEMPTS


def _is_given_up(replica: ReplicaStatus) -> bool:
    return replica["state"] == "stopped" and bool(replica["last_error"])


def _retry_note(replica: ReplicaStatus, *, may_retry: bool) -> str:
    retried = may_retry and not _is_given_up(replica)
    return "it is tried again" if retried else "it is not tried again"
