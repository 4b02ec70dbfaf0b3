"""Watches a sync and interrupts it on the loss of the trainer or a participant, or on a stall.

The trainer is watched through a connection to its TCPStore. Invariants: blocking calls run in
threads with their own limiter, at most one per connection at a time, so the event loop never waits
for the network; no watch waits for another one. A participant that reports its progress late is
ignored until its connection is found closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Final, Protocol

import trio

from omni_proxy.fleet.worker import Worker
from omni_proxy.process_group.rendezvous import StoreConnection, connect_store
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.weight_sync.protocol.participant_reports import ReceiveProgress, StallDetector
from omni_proxy.weight_sync.protocol.trainer_group import SyncState, WeightSync
from omni_proxy.weight_sync.sync.participant import Participant
from omni_proxy.weight_sync.worker_calls import wait_until_refused

POLL_SECS: Final = 0.05
PING_SECS: Final = 1.0
PING_TIMEOUT_SECS: Final = 5.0  # for one ping; a trainer on a busy machine is pinged again
MAX_THREADS: Final = 8
SILENT_SECS: Final = 10.0


class TrainerLink:
    """Connection to a trainer's store that shows whether it is alive. Open and close it once."""

    _threads: trio.CapacityLimiter | None = None

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._link: StoreConnection | None = None
        self._closed = False
        self._ping_lock = trio.Lock()

    @property
    def is_open(self) -> bool:
        return self._link is not None

    async def open(self, silent_secs: float = SILENT_SECS) -> None:
        """Wait until the store answers. Raises GroupError if another service listens there."""
        await trio.to_thread.run_sync(
            self._open, silent_secs, abandon_on_cancel=True, limiter=self._thread_limiter()
        )

    async def wait_gone(self, silent_secs: Callable[[], float]) -> str:
        """Wait until the connection ends, or the trainer is silent for `silent_secs()`.

        Returns the reason why the trainer counts as dead.
        """
        answered_at = trio.current_time()
        while True:
            if await self.has_ended():
                return "its connection has ended"
            silent = trio.current_time() - answered_at
            if silent >= PING_SECS:
                # A ping also detects that the connection has ended.
                remaining = max(silent_secs(), PING_SECS) - silent
                if await self.ping(min(max(remaining, POLL_SECS), PING_TIMEOUT_SECS)):
                    answered_at = trio.current_time()
                elif trio.current_time() - answered_at >= silent_secs():
                    return f"its store has not answered for {silent_secs():g} s"
            await trio.sleep(POLL_SECS)

    async def ping(self, timeout_secs: float) -> bool:
        """Whether the trainer's store answers; False if the connection was never opened."""
        async with self._ping_lock:
            link = self._link
            if link is None:
                return False
            return await trio.to_thread.run_sync(
                self._ping,
                link,
                timeout_secs,
                abandon_on_cancel=True,
                limiter=self._thread_limiter(),
            )

    def close(self) -> None:
        """Close without blocking; a ping in progress may keep the connection open for a while."""
        self._closed = True
        if self._link is not None:
            threading.Thread(
                target=self._link.close, name="trainer-link-close", daemon=True
            ).start()

    async def has_ended(self) -> bool:
        """Whether the trainer closed the connection; False if it was not opened yet."""
        async with self._ping_lock:
            return self._link is not None and self._link.has_ended()

    def _ping(self, link: StoreConnection, timeout_secs: float) -> bool:
        """Ping; if the answer is late, ping again on a new connection.

        On the old connection a late answer would be read as the answer to the next ping. Both pings
        together take at most `timeout_secs`.
        """
        each_secs = timeout_secs / 2
        if link.answers(each_secs):
            return True
        ends_at = time.monotonic() + each_secs
        if link.has_ended():
            return False
        try:
            new_link = connect_store(
                self._address, each_secs, lambda: self._closed or time.monotonic() >= ends_at
            )
        except GroupError:
            return False
        self._link = new_link
        link.close()
        if self._closed:
            new_link.close()
        return True

    def _open(self, silent_secs: float) -> None:
        link = connect_store(self._address, silent_secs, lambda: self._closed)
        self._link = link
        if self._closed:
            link.close()

    @classmethod
    def _thread_limiter(cls) -> trio.CapacityLimiter:
        if cls._threads is None:
            cls._threads = trio.CapacityLimiter(MAX_THREADS)
        return cls._threads


async def is_store_reachable(host: str, port: int, timeout_secs: float) -> bool:
    """Whether a store answers at the address now; for a trainer whose link never opened."""
    link = TrainerLink(host, port)
    try:
        with trio.move_on_after(timeout_secs):
            await link.open(timeout_secs)
            return True
    except GroupError:
        return False
    finally:
        link.close()
    return False


PROGRESS_INTERVAL_SECS: Final = 0.5
_MOVING: Final = (SyncState.ARMING, SyncState.ARMED, SyncState.COMMITTING)


class WatchedSync(Protocol):
    """The parts of a sync that the watchdog uses."""

    sync: WeightSync
    config_store: ConfigStore
    participants: dict[str, Participant]
    workers: list[Worker]

    def interrupt(self, cause: str, reason: str, name: str = "") -> None: ...

    def on_participant_lost(self, worker: Worker, reason: str) -> None: ...


async def watch(watched: WatchedSync, link: TrainerLink | None) -> None:
    """Run until cancelled; report losses and stalls to `watched.interrupt`."""
    async with trio.open_nursery() as nursery:
        if link is not None:
            nursery.start_soon(_watch_owner, watched, link)
        nursery.start_soon(_watch_progress, watched)
        for worker in watched.workers:
            nursery.start_soon(_watch_participant, watched, worker)


async def _watch_owner(watched: WatchedSync, link: TrainerLink) -> None:
    try:
        await link.open()
    except GroupError as error:
        if watched.sync.state is SyncState.JOINING:
            watched.interrupt(str(error), "owner_unreachable")
        return

    def silent_secs() -> float:
        """Unlimited between rounds: a trainer that only has a group may be busy for any time."""
        moving = watched.sync.state in _MOVING or watched.sync.has_unpublished
        return _stall_secs(watched) if moving else inf

    reason = await link.wait_gone(silent_secs)
    watched.interrupt(f"the trainer is gone: {reason}", "owner_dead")


async def _watch_participant(watched: WatchedSync, worker: Worker) -> None:
    reason = await wait_until_refused(worker, watched.config_store.config.health.endpoint)
    watched.on_participant_lost(worker, reason)


async def _watch_progress(watched: WatchedSync) -> None:
    """Detect a stall while all participants are armed; otherwise the running call times out."""
    detector: StallDetector | None = None
    while True:
        await trio.sleep(PROGRESS_INTERVAL_SECS)
        if watched.sync.state is not SyncState.ARMED:
            detector = None
            continue
        detector = detector or StallDetector(trio.current_time())
        reports = await _read_progress(watched.participants)
        if watched.sync.state is SyncState.ARMED:
            first_secs = watched.config_store.config.weight_sync.ready_timeout_secs or inf
            now = trio.current_time()
            reason, name = detector.update(now, reports, _stall_secs(watched), first_secs)
            if reason:
                watched.interrupt(reason, "member_failed" if name else "stall", name)


async def _read_progress(participants: Mapping[str, Participant]) -> dict[str, ReceiveProgress]:
    reports: dict[str, ReceiveProgress] = {}

    async def read_one(participant: Participant) -> None:
        if (report := await participant.read_progress()) is not None:
            reports[participant.name] = report

    async with trio.open_nursery() as nursery:
        for participant in participants.values():
            nursery.start_soon(read_one, participant)
    return reports


def _stall_secs(watched: WatchedSync) -> float:
    return watched.config_store.config.weight_sync.stall_timeout_secs or inf
