"""Watches a sync for what should end it: the trainer, the members, a stalled transfer.

Invariant: no watch waits for another one. A member that is slow to report its progress is ignored
until it is found to be gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final, Protocol

import trio

from omni_proxy.fleet.worker import Worker
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.weight_sync.protocol.receive_progress import ReceiveProgress, StallDetector
from omni_proxy.weight_sync.protocol.session import SyncSession, SyncState
from omni_proxy.weight_sync.session.member import Member
from omni_proxy.weight_sync.session.trainer_link import TrainerLink
from omni_proxy.weight_sync.worker_calls import wait_until_refused

PROGRESS_INTERVAL_SECS: Final = 0.5
_MOVING: Final = (SyncState.ARMING, SyncState.ARMED, SyncState.COMMITTING)


class WatchedSync(Protocol):
    """What the watchdog needs of a session lifecycle."""

    session: SyncSession
    config_store: ConfigStore
    members: dict[str, Member]
    workers: list[Worker]

    def interrupt(self, cause: str, reason: str, name: str = "") -> None: ...

    def on_member_lost(self, worker: Worker, reason: str) -> None: ...


async def watch(sync: WatchedSync, link: TrainerLink | None) -> None:
    """Run until cancelled; a finding is reported to `sync.interrupt`."""
    async with trio.open_nursery() as nursery:
        if link is not None:
            nursery.start_soon(_watch_owner, sync, link)
        nursery.start_soon(_watch_progress, sync)
        for worker in sync.workers:
            nursery.start_soon(_watch_member, sync, worker)


async def _watch_owner(sync: WatchedSync, link: TrainerLink) -> None:
    try:
        await link.open()
    except GroupError as error:
        if sync.session.state is SyncState.JOINING:
            sync.interrupt(str(error), "owner_unreachable")
        return

    def silent_secs() -> float:
        """A trainer that only has a group may be busy without limit."""
        moving = sync.session.state in _MOVING or sync.session.has_unpublished
        return _stall_secs(sync) if moving else inf

    reason = await link.wait_gone(silent_secs)
    sync.interrupt(f"the trainer is gone: {reason}", "owner_dead")


async def _watch_member(sync: WatchedSync, worker: Worker) -> None:
    reason = await wait_until_refused(worker, sync.config_store.config.health.endpoint)
    sync.on_member_lost(worker, reason)


async def _watch_progress(sync: WatchedSync) -> None:
    """Detect a stall while all members are armed; a running call reports its own failure."""
    detector: StallDetector | None = None
    while True:
        await trio.sleep(PROGRESS_INTERVAL_SECS)
        if sync.session.state is not SyncState.ARMED:
            detector = None
            continue
        detector = detector or StallDetector(trio.current_time())
        reports = await _read_progress(sync.members)
        if sync.session.state is SyncState.ARMED:
            first_secs = sync.config_store.config.weight_sync.ready_timeout_secs or inf
            now = trio.current_time()
            reason, name = detector.update(now, reports, _stall_secs(sync), first_secs)
            if reason:
                sync.interrupt(reason, "member_failed" if name else "stall", name)


async def _read_progress(members: Mapping[str, Member]) -> dict[str, ReceiveProgress]:
    reports: dict[str, ReceiveProgress] = {}

    async def read_one(member: Member) -> None:
        if (report := await member.read_progress()) is not None:
            reports[member.name] = report

    async with trio.open_nursery() as nursery:
        for member in members.values():
            nursery.start_soon(read_one, member)
    return reports


def _stall_secs(sync: WatchedSync) -> float:
    return sync.config_store.config.weight_sync.stall_timeout_secs or inf
