"""The receiver whose blocking threads live in child processes, one for each group.

Whatever a peer does ends or holds that child alone: to disarm is to kill it. The next group gets a
new one. No torch in this process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.process_group.cancel_token import CancelToken
from omni_proxy.process_group.child_handle import ChildEnded, ChildHandle, Event
from omni_proxy.process_group.child_pool import START_SECS, Children
from omni_proxy.process_group.forkserver_client import SHARED, ForkServer
from omni_proxy.process_group.group import REMEMBERED_ENDS, GroupLimits
from omni_proxy.process_group.ipc import Arm, Ask, Begin, Destroy, Ended, Init, Moved, Reply
from omni_proxy.process_group.mapped_file import FileRegion, mapped, span
from omni_proxy.process_group.receive import views
from omni_proxy.process_group.rendezvous import Meeting, Rendezvous, checked
from omni_proxy.process_group.shared_buffers import Lease, SharedBlocks
from omni_proxy.process_group.subprocess_sender import ProcessSender
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan
from omni_proxy.process_group.transfer import ReceiveOrder, Transfer

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# How much longer than its own deadline a child may take to say that it has passed.
SLACK_SECS: Final = 3.0
# An orderly end or a question; whoever takes longer is not asked again.
ANSWER_SECS: Final = 2.0


class State(StrEnum):
    JOINING = "joining"
    READY = "ready"
    ARMING = "arming"
    RECEIVING = "receiving"


class _Group:
    """One group; its fields change under the lock of `ProcessReceiver`."""

    __slots__ = ("armed", "child", "rendezvous", "state")

    def __init__(self, rendezvous: Rendezvous, child: ChildHandle) -> None:
        self.rendezvous = rendezvous
        self.child = child
        self.state = State.JOINING
        self.armed: Transfer[ProcessReceived] | None = None

    @property
    def name(self) -> str:
        return self.rendezvous.group_name

    @property
    def owner(self) -> str:
        host, port = checked(self.rendezvous)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ProcessReceiver:
    """See `Receiver`."""

    def __init__(self, limits: GroupLimits, name: str) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._ends: dict[str, str] = {}
        level = logging.getLogger().getEffectiveLevel()
        begin = Begin(
            limits.stall_secs,
            limits.silent_secs,
            limits.ping_secs,
            limits.first_byte_secs,
            limits.receive_secs,
            level,
        )

        def start(nest: ForkServer) -> ChildHandle:
            return ChildHandle(begin, f"weights-child-{name}", nest)

        self._children = Children(SHARED, start)
        self._blocks = SharedBlocks(limits.keep_bytes, self._children.forget)

    def warm(self) -> None:
        self._children.warm()

    def init(self, rendezvous: Rendezvous, stop: CancelToken | None = None) -> None:
        stop = stop or CancelToken()
        checked(rendezvous)
        name = rendezvous.group_name
        self._make_room(name)
        group = _Group(rendezvous, self._children.take())
        with self._lock:
            taken = name in self._groups
            if not taken:
                self._groups[name] = group
        if taken:
            group.child.kill("no longer needed")
            raise GroupError(f"group {name!r} is just being initialized")
        try:
            reply = self._meet(group, stop)
        except GroupError as error:
            self._take_out(group)
            group.child.kill(str(error))
            raise
        if reply.error is not None:
            self._take_out(group)
            group.child.kill(reply.error)
            raise GroupError(reply.error)
        with self._lock:
            if self._groups.get(name) is not group:
                raise GroupError(f"group {name!r} was destroyed")
            group.state = State.READY
            self._ends.pop(name, None)

    def _meet(self, group: _Group, stop: CancelToken) -> Reply:
        child, rendezvous = group.child, group.rendezvous
        stop.hear(child.kill)
        try:
            # A meeting's time begins when there is somebody who can go there.
            child.require_ready(START_SECS)
            return child.call(Init(child.number(), rendezvous), rendezvous.timeout_s + SLACK_SECS)
        finally:
            stop.hear(None)

    def arm(
        self,
        group_name: str,
        plans: Sequence[TensorPlan],
        *,
        ready_secs: float,
        into: FileRegion | None = None,
        digests: bool = False,
    ) -> Transfer[ProcessReceived]:
        order = ReceiveOrder(tuple(plans), digests, into.starts if into is not None else None)
        group = self._claim(group_name)
        try:
            landing = self._landing(order, into)
        except BaseException:
            self._back_to_ready(group)
            raise
        armed: Transfer[ProcessReceived] = Transfer(order, lambda why: self._end(group, why))
        with self._lock:
            group.armed = armed
        self._post(group, armed, landing, ready_secs)
        return armed

    def destroy(self, group_name: str) -> None:
        with self._lock:
            known = self._ends.pop(group_name, None) is not None
            group = self._groups.pop(group_name, None)
        if group is None:
            if not known:
                raise GroupError("The group to be destroyed does not exist.")
            return
        if group.state is State.READY:
            # In good order, where that is to be had.
            with suppress(GroupError):
                group.child.call(Destroy(group.child.number(), group_name), ANSWER_SECS)
        group.child.kill(f"group {group_name!r} was destroyed")

    def sender(self, meeting: Meeting) -> ProcessSender:
        return ProcessSender(meeting, self._children, self._blocks)

    def busy(self) -> bool:
        return bool(self._children.living())

    def status(self) -> dict[str, Any]:
        with self._lock:
            groups = list(self._groups.values())
        return {
            "isolation": "process",
            "groups": [_shown(group) for group in groups],
            "abandoned_threads": [],
            "kept_bytes": self._blocks.kept_bytes(),
            "processes": self._children.pids(),
        }

    def close(self) -> None:
        with self._lock:
            self._groups.clear()
        self._children.close()
        self._blocks.trim(keep_bytes=0)

    def _make_room(self, name: str) -> None:
        with self._lock:
            holder = self._groups.get(name)
        if holder is None:
            return
        if _asked(holder, self._limits.ping_secs + ANSWER_SECS, ping=True).get("owner_answers"):
            raise GroupError(
                f"group {name!r} is {holder.state} for the trainer at {holder.owner}, which is "
                "alive: destroy that group first, or use another group_name"
            )
        log.warning("group %r: its trainer at %s has gone; replaced", name, holder.owner)
        self._end(holder, "its trainer has gone, and another one has taken its place")

    def _claim(self, name: str) -> _Group:
        with self._lock:
            group = self._groups.get(name)
            if group is None and name in self._ends:
                raise GroupError(
                    f"group {name!r} is gone ({self._ends[name]}): call "
                    "init_weights_update_group again"
                )
            if group is None:
                raise GroupError(
                    f"group {name!r} is not initialized: call init_weights_update_group first"
                )
            if group.state is not State.READY:
                raise GroupError(f"group {name!r} is {group.state}: one receive at a time")
            group.state = State.ARMING
            return group

    def _landing(self, order: ReceiveOrder, into: FileRegion | None) -> Lease | FileRegion:
        if into is None:
            return self._blocks.take(order.whole.block_bytes)
        span(into, order.plans)
        return replace(into, path=os.path.abspath(into.path))

    def _post(
        self,
        group: _Group,
        armed: Transfer[ProcessReceived],
        landing: Lease | FileRegion,
        ready_secs: float,
    ) -> None:
        child, order = group.child, armed.order
        arm = Arm(child.number(), group.name, order.plans, ready_secs, order.digests)
        descriptors: tuple[int, ...] = ()
        if isinstance(landing, Lease):
            arm.block, descriptors = landing.block.number, (landing.block.descriptor,)
        else:
            arm.place = landing
        child.follow(arm.number, self._listener(group, armed, landing))
        try:
            reply = child.call(arm, ready_secs + SLACK_SECS, *descriptors)
        except GroupError as error:
            self._end(group, str(error))
            raise armed.fault() or GroupError(str(error), group_dropped=True) from None
        if reply.error is not None:
            child.unfollow(arm.number)
            if reply.dropped:
                self._end(group, reply.error)
            else:
                self._back_to_ready(group)
            raise GroupError(reply.error, group_dropped=reply.dropped)
        with self._lock:
            if group.state is State.ARMING:
                group.state = State.RECEIVING

    def _listener(
        self, group: _Group, armed: Transfer[ProcessReceived], landing: Lease | FileRegion
    ) -> Callable[[Event | ChildEnded], None]:
        box = [landing]  # so that not even this function keeps memory that was given back

        def heard(event: Event | ChildEnded) -> None:
            match event:
                case Moved(messages_done=messages_done, bytes_come=bytes_come):
                    armed.moved(messages_done, bytes_come)
                case Ended(error=None):
                    self._back_to_ready(group)
                    armed.finish(ProcessReceived(armed.order, box.pop(), event))
                case Ended(error=why):
                    self._end(group, str(why))
                    box.clear()
                    armed.fail(GroupError(str(why), group_dropped=True))
                case ChildEnded():
                    box.clear()
                    done, all_of_them = armed.progress().buckets_done, len(armed.order.plans)
                    why = f"group {group.name!r}: after {done} of {all_of_them} buckets: {event}"
                    self._end(group, why)
                    armed.fail(GroupError(why, group_dropped=True))

        return heard

    def _back_to_ready(self, group: _Group) -> None:
        with self._lock:
            group.state, group.armed = State.READY, None

    def _end(self, group: _Group, why: str) -> None:
        """Disarms and drops a group; its name is remembered, so that the next call hears why."""
        with self._lock:
            if self._groups.get(group.name) is group:
                del self._groups[group.name]
                self._ends[group.name] = why
                while len(self._ends) > REMEMBERED_ENDS:
                    self._ends.pop(next(iter(self._ends)))
        group.child.kill(why)

    def _take_out(self, group: _Group) -> None:
        with self._lock:
            if self._groups.get(group.name) is group:
                del self._groups[group.name]


class ProcessReceived:
    """See `Received`: in shared memory, or in the file that it was received into."""

    def __init__(self, order: ReceiveOrder, landing: Lease | FileRegion, ended: Ended) -> None:
        self.buckets = len(order.plans)
        self.nbytes = order.nbytes
        self.secs = ended.secs
        self.digests = ended.digests
        self._order = order
        self._landing: Lease | FileRegion | None = landing

    def tensors(self) -> dict[str, torch.Tensor]:
        landing = self._landing
        if landing is None:
            raise ValueError("this memory was given back already")
        if isinstance(landing, Lease):
            return views(self._order.whole, landing.tensor())
        with open(landing.path, "r+b") as file:
            return views(self._order.whole, mapped(file.fileno(), os.fstat(file.fileno()).st_size))

    def close(self) -> None:
        self._landing = None


def _asked(group: _Group, within_secs: float, *, ping: bool) -> dict[str, int]:
    """What the child knows about its group's trainer; empty where it does not answer."""
    try:
        return group.child.call(Ask(group.child.number(), group.name, ping), within_secs).found
    except GroupError:
        return {}


def _shown(group: _Group) -> dict[str, Any]:
    armed = group.armed
    messages_done, bytes_come = 0, 0
    if armed is not None:
        progress = armed.progress()
        messages_done, bytes_come = progress.messages_done, progress.bytes_come
    return {
        "group_name": group.name,
        "backend": group.rendezvous.backend,
        "rank": group.rendezvous.rank,
        "world_size": group.rendezvous.world_size,
        "owner": group.owner,
        "owner_gone": bool(_asked(group, ANSWER_SECS, ping=False).get("owner_gone")),
        "state": group.state.value,
        "process": group.child.pid,
        "messages_done": messages_done,
        "bytes_come": bytes_come,
    }
