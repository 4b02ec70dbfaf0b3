"""What ends a sync from outside: its owner, its members, and bytes that do not come, all watched.

Invariant: nobody is waited for here; whoever is slow to tell how far it has come is left alone
until it is found to be gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Final

import trio

from omni_proxy.fleet.worker import Worker
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.weight_sync.operations.worker_calls import until_refused
from omni_proxy.weight_sync.protocol.receive_progress import ReceiveProgress, StallDetector
from omni_proxy.weight_sync.protocol.states import SyncState
from omni_proxy.weight_sync.session.member import Member
from omni_proxy.weight_sync.session.trainer_link import TrainerLink

if TYPE_CHECKING:
    from omni_proxy.weight_sync.session.lifecycle import SessionLifecycle

LOOK_SECS: Final = 0.5
_MOVING: Final = (SyncState.ARMING, SyncState.ARMED, SyncState.COMMITTING)


async def watch(life: SessionLifecycle, link: TrainerLink) -> None:
    """Until it is cancelled; what it finds goes to `life.interrupt`."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_owner, life, link)
        nursery.start_soon(_receive, life)
        for worker in life.workers:
            nursery.start_soon(_member, life, worker)


async def _owner(life: SessionLifecycle, link: TrainerLink) -> None:
    try:
        await link.open()
    except GroupError as error:
        if life.session.state is SyncState.JOINING:
            life.interrupt(str(error), "owner_unreachable")
        return

    def silent_secs() -> float:
        """One that only has a group may be busy for ever."""
        return _stall_secs(life) if life.session.state in _MOVING else inf

    gone = await link.until_gone(silent_secs)
    life.interrupt(f"the trainer is gone: {gone}", "owner_dead")


async def _member(life: SessionLifecycle, worker: Worker) -> None:
    why = await until_refused(worker, life.config_store.config.health.endpoint)
    life.member_lost(worker, why)


async def _receive(life: SessionLifecycle) -> None:
    """While all are armed: what a call is under way for, its answers tell."""
    clock: StallDetector | None = None
    while True:
        await trio.sleep(LOOK_SECS)
        if life.session.state is not SyncState.ARMED:
            clock = None
            continue
        clock = clock or StallDetector(trio.current_time())
        told = await _told_by(life.members)
        if life.session.state is SyncState.ARMED:
            first_secs = life.config_store.config.weight_sync.ready_timeout_secs or inf
            now = trio.current_time()
            why, name = clock.hear(now, told, _stall_secs(life), first_secs)
            if why:
                life.interrupt(why, "member_failed" if name else "stall", name)


async def _told_by(members: Mapping[str, Member]) -> dict[str, ReceiveProgress]:
    told: dict[str, ReceiveProgress] = {}

    async def ask(member: Member) -> None:
        if (found := await member.look()) is not None:
            told[member.name] = found

    async with trio.open_nursery() as nursery:
        for member in members.values():
            nursery.start_soon(ask, member)
    return told


def _stall_secs(life: SessionLifecycle) -> float:
    return life.config_store.config.weight_sync.stall_timeout_secs or inf
