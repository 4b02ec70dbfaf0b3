"""The weights-update groups that we are a rank of: init, destroy, receive, status, close.

joining -> ready <-> receiving; any failure and every end of the owner drops the group, since a
group that failed once only hangs later. All calls block: use a thread of your own for each.
`destroy` and `close` may be called while another thread is inside `init` or `receive`: that one
then raises GroupError within a tick. Nothing here knows HTTP, the model or the scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.process_group.backend import Backend, join, require_backend, told
from omni_proxy.process_group.blocking_call import AbandonedThreads, BlockingCall
from omni_proxy.process_group.buffers import KEEP_BYTES, Buffers
from omni_proxy.process_group.cancel_token import CancelToken
from omni_proxy.process_group.receive import (
    OWNER_GONE,
    Moved,
    ReceiveResult,
    Reception,
    Surroundings,
    mark_of,
)
from omni_proxy.process_group.rendezvous import Rendezvous, checked
from omni_proxy.process_group.store_connection import StoreLink, open_store_link
from omni_proxy.process_group.tensor_plan import Announced, GroupError, plan_of
from omni_proxy.process_group.transfer import LocalReceived, ReceiveOrder, Transfer, run_underway

if TYPE_CHECKING:
    import torch

__all__ = ["GroupError", "GroupLimits", "Groups", "Rendezvous"]

log = logging.getLogger(__name__)

REMEMBERED_ENDS: Final = 32


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """How patient groups are.

    `stall_secs`: a receive in which nothing comes for so long is ended; `first_byte_secs`: how long
    an armed one waits for its first byte, None = as long as that. `silent_secs`: how long a
    port may accept without a store's answer. `ping_secs`: how long the owner of a group whose name
    is wanted by another may take to show that it lives. `keep_bytes`: receive memory kept for the
    next time. `receive_secs`: how long one receive may take that never stands still.
    """

    stall_secs: float = 30.0
    # A trainer's store looks up the names of its visitors: a DNS that is gone takes 10 s each time.
    silent_secs: float = 12.0
    ping_secs: float = 2.0
    keep_bytes: int = KEEP_BYTES
    first_byte_secs: float | None = None
    receive_secs: float = 3600.0


class GroupState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    RECEIVING = "receiving"


class _Member:
    """One group as seen from here; its fields change under the lock of `Groups`."""

    __slots__ = ("address", "link", "rendezvous", "state", "stop", "transport", "watch_of")

    def __init__(self, rendezvous: Rendezvous, address: tuple[str, int]) -> None:
        self.rendezvous = rendezvous
        self.address = address
        self.state = GroupState.JOINING
        self.transport: Backend | None = None
        self.link: StoreLink | None = None
        self.stop: str | None = None
        self.watch_of: Reception | None = None

    def owner(self) -> str:
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def owner_gone(self) -> bool:
        return self.link is not None and self.link.ended()


class Groups:
    """All groups of one rank of a replica. Every method may be called from any thread."""

    def __init__(self, limits: GroupLimits | None = None) -> None:
        self._limits = limits or GroupLimits()
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._ends: dict[str, str] = {}
        self._threads = AbandonedThreads()
        self._kept = Buffers(self._limits.keep_bytes)
        self._closed = False

    def init(self, rendezvous: Rendezvous, stop: CancelToken | None = None) -> None:
        """Joins the trainer's group; returns once all ranks are there (NCCL: once we are).

        A group of this name whose trainer lives is left as it is, one whose trainer has gone is
        replaced. Raises GroupError; then no group of this name is left behind. `stop` ends it.
        """
        address = checked(rendezvous)
        require_backend(rendezvous.backend, rendezvous.device)
        self._make_room(rendezvous.group_name)
        member = _Member(rendezvous, address)
        with self._lock:
            if self._closed:
                raise GroupError("the replica is shutting down")
            if rendezvous.group_name in self._members:
                raise GroupError(f"group {rendezvous.group_name!r} is just being initialized")
            self._members[rendezvous.group_name] = member
        joined = False
        try:
            if stop is not None:
                stop.hear(lambda why: setattr(member, "stop", member.stop or why))
            self._join(member)
            joined = True
        finally:
            if stop is not None:
                stop.hear(None)
            self._leave_state(member, keep=joined)
        if member.stop is not None:
            raise GroupError(member.stop)

    def destroy(self, group_name: str) -> None:
        """Ends a group, whatever it is doing; raises GroupError where there is none.

        One that a failure has dropped already counts as there, once.
        """
        with self._lock:
            known = self._ends.pop(group_name, None) is not None
            member = self._members.pop(group_name, None)
            if member is not None:
                member.stop = f"group {group_name!r} was destroyed"
        if member is None and not known:
            raise GroupError("The group to be destroyed does not exist.")
        if member is not None and member.state is GroupState.READY:
            self._drop(member)

    def receive(
        self,
        group_name: str,
        specs: Iterable[Announced],
        load_format: str | None = None,
        progress: Moved | None = None,
    ) -> dict[str, torch.Tensor]:
        """What the trainer broadcasts for these specs, by name, in memory of its own.

        The memory is used again only after the last of these tensors was dropped. Raises
        GroupError: with `group_dropped` false nothing was touched, else the group is gone.
        `progress(messages_done, bytes_come)` is called in the calling thread.
        """
        plan = plan_of(specs, load_format)
        member = self._claim(group_name)
        return self._receive(member, ReceiveOrder((plan,)), threading.Event(), progress).tensors()

    def arm(
        self, group_name: str, order: ReceiveOrder, *, ready_secs: float
    ) -> Transfer[LocalReceived]:
        """Returns once the first receive is posted; what comes is watched by a thread of its own.

        Raises GroupError: then nothing is armed; with `group_dropped` the group is gone as well.
        """
        member = self._claim(group_name)
        if member.owner_gone():
            gone = GroupError(f"group {group_name!r}: {OWNER_GONE}", group_dropped=True)
            self._remember(member, OWNER_GONE, dropped=True)
            self._leave_state(member, keep=False)
            raise gone

        def stop(why: str) -> None:
            member.stop = member.stop or why

        def transfer(posted: threading.Event, moved: Moved) -> LocalReceived:
            return LocalReceived(order, self._receive(member, order, posted, moved))

        armed: Transfer[LocalReceived] = Transfer(order, stop)
        run_underway(f"weights-watch-{group_name}", armed, transfer, ready_secs)
        return armed

    def owner_gone(self, group_name: str) -> bool:
        """Whether the trainer of this group has closed its store; returns at once."""
        with self._lock:
            member = self._members.get(group_name)
        return member is not None and member.owner_gone()

    def owner_answers(self, group_name: str) -> bool:
        """Whether the trainer of this group shows within `ping_secs` that it lives."""
        with self._lock:
            member = self._members.get(group_name)
        if member is None:
            return False
        return member.link is None or member.link.answers(self._limits.ping_secs)

    def _receive(
        self,
        member: _Member,
        order: ReceiveOrder,
        posted: threading.Event,
        moved: Moved | None,
    ) -> ReceiveResult:
        came: ReceiveResult | None = None
        reception: Reception | None = None
        try:
            assert member.transport is not None
            block = self._block_for(order, member.transport)
            mark = mark_of(member.rendezvous.group_name, member.rendezvous.world_size)
            reception = Reception(member.transport, order.whole, block, mark, digests=order.digests)
            member.watch_of = reception
            came = reception.run(self._around(member), moved, posted.set)
        except GroupError as error:
            self._remember(member, str(error), dropped=error.group_dropped)
            raise
        finally:
            member.watch_of = None
            self._leave_state(member, keep=came is not None or reception is None)
        return came

    def _block_for(self, order: ReceiveOrder, transport: Backend) -> torch.Tensor:
        try:
            if order.block is None:
                return transport.block(order.whole.block_bytes, self._kept)
            return order.block(order.whole)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            raise GroupError(f"no memory for the announced tensors: {error}") from None

    def status(self) -> dict[str, Any]:
        """JSON-ready: the groups with what they do, threads that torch holds, memory kept."""
        with self._lock:
            groups = [_shown(member) for member in self._members.values()]
        return {
            "groups": groups,
            "abandoned_threads": self._threads.names(),
            "kept_bytes": self._kept.kept_bytes(),
        }

    def close(self) -> None:
        """Ends all groups for good and gives memory back; blocked calls elsewhere end at once."""
        with self._lock:
            self._closed = True
            names = list(self._members)
        for name in names:
            with suppress(GroupError):  # someone else was faster
                self.destroy(name)
        self._kept.clear()

    def _make_room(self, group_name: str) -> None:
        with self._lock:
            holder = self._members.get(group_name)
        if holder is None:
            return
        if self.owner_answers(group_name):
            raise GroupError(
                f"group {group_name!r} is {holder.state} for the trainer at {holder.owner()}, "
                "which is alive: destroy that group first, or use another group_name"
            )
        log.warning("group %r: its trainer at %s has gone; replaced", group_name, holder.owner())
        with suppress(GroupError):  # it ended by itself meanwhile
            self.destroy(group_name)

    def _join(self, member: _Member) -> None:
        until = time.monotonic() + member.rendezvous.timeout_s
        links: list[StoreLink] = []
        call = _joining(member, links, until, self._limits.silent_secs)
        errand = BlockingCall(f"weights-init-{member.rendezvous.group_name}", call)

        def why_stop() -> str | None:
            if member.stop is not None:
                return member.stop
            if links and links[0].ended():
                return f"the trainer at {member.owner()} has gone, while {errand.step}"
            if time.monotonic() > until:
                return f"no group within {member.rendezvous.timeout_s:g} s, while {errand.step}"
            member.link = links[0] if links else None
            return None

        try:
            member.transport = self._threads.wait_for(errand, why_stop)
        except GroupError:
            for link in links:
                link.close()
            raise
        member.link = links[0]

    def _claim(self, group_name: str) -> _Member:
        with self._lock:
            member = self._members.get(group_name)
            if member is None and group_name in self._ends:
                raise GroupError(
                    f"group {group_name!r} is gone ({self._ends[group_name]}): call "
                    "init_weights_update_group again"
                )
            if member is None:
                raise GroupError(
                    f"group {group_name!r} is not initialized: call init_weights_update_group first"
                )
            if member.state is not GroupState.READY:
                raise GroupError(f"group {group_name!r} is {member.state}: one receive at a time")
            member.state = GroupState.RECEIVING
            return member

    def _around(self, member: _Member) -> Surroundings:
        limits = self._limits
        return Surroundings(
            group_name=member.rendezvous.group_name,
            timeout_secs=limits.receive_secs,
            stall_secs=limits.stall_secs,
            first_byte_secs=limits.first_byte_secs or limits.stall_secs,
            stopped=lambda: member.stop,
            owner_gone=member.owner_gone,
            threads=self._threads,
        )

    def _remember(self, member: _Member, why: str, *, dropped: bool) -> None:
        with self._lock:
            # Not of one that was destroyed: that is what its owner wanted.
            if not dropped or self._members.get(member.rendezvous.group_name) is not member:
                return
            self._ends[member.rendezvous.group_name] = why
            while len(self._ends) > REMEMBERED_ENDS:
                self._ends.pop(next(iter(self._ends)))

    def _leave_state(self, member: _Member, *, keep: bool) -> None:
        """Back to ready, or gone: when a blocking step is over, however it ended."""
        name = member.rendezvous.group_name
        with self._lock:
            stays = keep and member.stop is None
            if stays:
                member.state = GroupState.READY
                self._ends.pop(name, None)
            elif self._members.get(name) is member:
                del self._members[name]
        if not stays:
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        link, member.link = member.link, None
        if link is not None:
            link.close()
        box: list[Backend] = []
        if member.transport is not None:
            box.append(member.transport)
            member.transport = None
            self._threads.drop(f"weights-drop-{member.rendezvous.group_name}", _end, box)


def _joining(
    member: _Member, links: list[StoreLink], until: float, silent_secs: float
) -> Callable[[BlockingCall[Backend]], Backend]:
    rendezvous, address, owner = member.rendezvous, member.address, member.owner()

    def call(errand: BlockingCall[Backend]) -> Backend:
        errand.step = f"waiting for the trainer's store at {owner}"
        link = open_store_link(
            address, silent_secs, lambda: errand.abandoned or time.monotonic() > until
        )
        links.append(link)
        if errand.abandoned:
            link.close()
            raise GroupError("given up")
        errand.step = f"waiting for all {rendezvous.world_size} ranks of the group"
        try:
            return join(rendezvous, address, max(until - time.monotonic(), 1.0))
        except RuntimeError as error:
            raise GroupError(f"no group, while {errand.step}: {told(error)}") from None

    return call


def _end(box: list[Backend]) -> None:
    box[0].abort()
    box.clear()


def _shown(member: _Member) -> dict[str, Any]:
    watched = member.watch_of
    return {
        "group_name": member.rendezvous.group_name,
        "backend": member.rendezvous.backend,
        "rank": member.rendezvous.rank,
        "world_size": member.rendezvous.world_size,
        "owner": member.owner(),
        "owner_gone": member.owner_gone(),
        "state": member.state.value,
        "messages_done": watched.watch.messages_done if watched else 0,
        "bytes_come": watched.watch.bytes_come if watched else 0,
    }
