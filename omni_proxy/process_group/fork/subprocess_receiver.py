"""The receiver whose blocking calls run in child processes, one for each group.

Invariant: a misbehaving peer crashes or blocks only its group's child. Disarming kills the child;
the next group gets a new one. No torch in this process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omni_proxy.process_group.blocking_call import CancelToken
from omni_proxy.process_group.broadcast.buffers import BlockLease, SharedBlockPool
from omni_proxy.process_group.broadcast.mapped_file import FileRegion, map_file, region_span
from omni_proxy.process_group.broadcast.receive import tensor_views
from omni_proxy.process_group.broadcast.transfer import ReceiveOrder, Transfer
from omni_proxy.process_group.fork.child_process import (
    QUERY_TIMEOUT_SECS,
    REPORT_GRACE_SECS,
    START_SECS,
    ChildEnded,
    ChildHandle,
    ChildPool,
    TransferEvent,
)
from omni_proxy.process_group.fork.forkserver_client import SHARED_FORK_SERVER, ForkServer
from omni_proxy.process_group.fork.ipc import (
    Arm,
    CheckTrainer,
    Configure,
    Destroy,
    Init,
    ProgressReport,
    Reply,
    TransferEnded,
)
from omni_proxy.process_group.fork.subprocess_sender import SubprocessSender
from omni_proxy.process_group.rank_protocol import (
    MAX_DROP_REASONS,
    GroupLimits,
    GroupState,
    ready_group,
)
from omni_proxy.process_group.rendezvous import HostedRendezvous, Rendezvous, validated_address
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class _ChildGroup:
    """One group and its child; its fields change under the lock of `SubprocessReceiver`."""

    __slots__ = ("child", "rendezvous", "state", "transfer")

    def __init__(self, rendezvous: Rendezvous, child: ChildHandle) -> None:
        self.rendezvous = rendezvous
        self.child = child
        self.state = GroupState.JOINING
        self.transfer: Transfer[SubprocessReceived] | None = None

    @property
    def name(self) -> str:
        return self.rendezvous.group_name

    @property
    def owner(self) -> str:
        host, port = validated_address(self.rendezvous)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class SubprocessReceiver:
    """A `Receiver` over child processes."""

    def __init__(self, limits: GroupLimits, name: str) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._groups: dict[str, _ChildGroup] = {}
        self._drop_reasons: dict[str, str] = {}
        level = logging.getLogger().getEffectiveLevel()
        configure = Configure(
            limits.stall_secs,
            limits.silent_secs,
            limits.ping_secs,
            limits.first_byte_secs,
            limits.receive_secs,
            level,
        )

        def start(fork_server: ForkServer) -> ChildHandle:
            return ChildHandle(configure, f"weights-child-{name}", fork_server)

        self._children = ChildPool(SHARED_FORK_SERVER, start)
        self._blocks = SharedBlockPool(limits.keep_bytes, self._children.release_blocks)

    def warm(self) -> None:
        self._children.warm()

    def init(self, rendezvous: Rendezvous, stop: CancelToken | None = None) -> None:
        stop = stop or CancelToken()
        validated_address(rendezvous)
        name = rendezvous.group_name
        self._replace_dead_group(name)
        group = _ChildGroup(rendezvous, self._children.start_child())
        with self._lock:
            exists = name in self._groups
            if not exists:
                self._groups[name] = group
        if exists:
            group.child.kill("no longer needed")
            raise GroupError(f"group {name!r} is already being initialized")
        try:
            reply = self._join(group, stop)
        except GroupError as error:
            self._remove(group)
            group.child.kill(str(error))
            raise
        if reply.error is not None:
            self._remove(group)
            group.child.kill(reply.error)
            raise GroupError(reply.error)
        with self._lock:
            if self._groups.get(name) is not group:
                raise GroupError(f"group {name!r} was destroyed")
            group.state = GroupState.READY
            self._drop_reasons.pop(name, None)

    def _join(self, group: _ChildGroup, stop: CancelToken) -> Reply:
        child, rendezvous = group.child, group.rendezvous
        stop.on_cancel(child.kill)
        try:
            # The rendezvous's timeout starts when the child is ready to join.
            child.require_ready(START_SECS)
            command = Init(child.next_number(), rendezvous)
            return child.call(command, rendezvous.timeout_s + REPORT_GRACE_SECS)
        finally:
            stop.on_cancel(None)

    def arm(
        self,
        group_name: str,
        plans: Sequence[TensorPlan],
        *,
        ready_secs: float,
        into: FileRegion | None = None,
        digests: bool = False,
    ) -> Transfer[SubprocessReceived]:
        order = ReceiveOrder(tuple(plans), digests, into.starts if into is not None else None)
        group = self._claim(group_name)
        try:
            target = self._allocate(order, into)
        except BaseException:
            self._set_ready(group)
            raise
        transfer: Transfer[SubprocessReceived] = Transfer(
            order, lambda reason: self._end(group, reason)
        )
        with self._lock:
            group.transfer = transfer
        self._post(group, transfer, target, ready_secs)
        return transfer

    def destroy(self, group_name: str) -> None:
        with self._lock:
            was_dropped = self._drop_reasons.pop(group_name, None) is not None
            group = self._groups.pop(group_name, None)
        if group is None:
            if not was_dropped:
                raise GroupError("The group to be destroyed does not exist.")
            return
        if group.state is GroupState.READY:
            # Leave in an orderly way first, if the child still answers.
            with suppress(GroupError):
                group.child.call(Destroy(group.child.next_number(), group_name), QUERY_TIMEOUT_SECS)
        group.child.kill(f"group {group_name!r} was destroyed")

    def sender(self, rendezvous: HostedRendezvous) -> SubprocessSender:
        return SubprocessSender(rendezvous, self._children, self._blocks)

    def busy(self) -> bool:
        return bool(self._children.running())

    def status(self) -> dict[str, Any]:
        with self._lock:
            groups = list(self._groups.values())
        return {
            "isolation": "process",
            "groups": [_group_status(group) for group in groups],
            "abandoned_threads": [],
            "kept_bytes": self._blocks.kept_bytes(),
            "processes": self._children.pids(),
        }

    def close(self) -> None:
        with self._lock:
            self._groups.clear()
        self._children.close()
        self._blocks.trim(keep_bytes=0)

    def _replace_dead_group(self, name: str) -> None:
        with self._lock:
            existing = self._groups.get(name)
        if existing is None:
            return
        reply = _check_trainer(existing, self._limits.ping_secs + QUERY_TIMEOUT_SECS, ping=True)
        if reply.get("owner_answers"):
            raise GroupError(
                f"group {name!r} is {existing.state} for the trainer at {existing.owner}, which is "
                "alive: destroy that group first, or use another group_name"
            )
        log.warning(
            "process_group_replaced group=%s old_trainer=%s reason=trainer_gone",
            name,
            existing.owner,
        )
        self._end(existing, "its trainer has gone, and another one has replaced it")

    def _claim(self, name: str) -> _ChildGroup:
        with self._lock:
            group = ready_group(self._groups, self._drop_reasons, name)
            group.state = GroupState.ARMING
            return group

    def _allocate(self, order: ReceiveOrder, into: FileRegion | None) -> BlockLease | FileRegion:
        if into is None:
            return self._blocks.take(order.merged_plan.block_bytes)
        region_span(into, order.plans)
        return replace(into, path=os.path.abspath(into.path))

    def _post(
        self,
        group: _ChildGroup,
        transfer: Transfer[SubprocessReceived],
        target: BlockLease | FileRegion,
        ready_secs: float,
    ) -> None:
        child, order = group.child, transfer.order
        arm = Arm(child.next_number(), group.name, order.plans, ready_secs, order.digests)
        descriptors: tuple[int, ...] = ()
        if isinstance(target, BlockLease):
            arm.block, descriptors = target.block.number, (target.block.descriptor,)
        else:
            arm.region = target
        child.subscribe(arm.number, self._event_handler(group, transfer, target))
        try:
            reply = child.call(arm, ready_secs + REPORT_GRACE_SECS, *descriptors)
        except GroupError as error:
            self._end(group, str(error))
            raise transfer.fault() or GroupError(str(error), group_dropped=True) from None
        if reply.error is not None:
            child.unsubscribe(arm.number)
            if reply.dropped:
                self._end(group, reply.error)
            else:
                self._set_ready(group)
            raise GroupError(reply.error, group_dropped=reply.dropped)
        with self._lock:
            if group.state is GroupState.ARMING:
                group.state = GroupState.RECEIVING

    def _event_handler(
        self,
        group: _ChildGroup,
        transfer: Transfer[SubprocessReceived],
        target: BlockLease | FileRegion,
    ) -> Callable[[TransferEvent | ChildEnded], None]:
        targets = [target]  # emptied at the end, so that this closure does not keep the memory

        def on_event(event: TransferEvent | ChildEnded) -> None:
            match event:
                case ProgressReport(messages_done=messages_done, bytes_received=bytes_received):
                    transfer.report_progress(messages_done, bytes_received)
                case TransferEnded(error=None):
                    self._set_ready(group)
                    transfer.finish(SubprocessReceived(transfer.order, targets.pop(), event))
                case TransferEnded(error=reason):
                    self._end(group, str(reason))
                    targets.clear()
                    transfer.fail(GroupError(str(reason), group_dropped=True))
                case ChildEnded():
                    targets.clear()
                    done, total = transfer.progress().buckets_done, len(transfer.order.plans)
                    reason = f"group {group.name!r}: after {done} of {total} buckets: {event}"
                    self._end(group, reason)
                    transfer.fail(GroupError(reason, group_dropped=True))

        return on_event

    def _set_ready(self, group: _ChildGroup) -> None:
        with self._lock:
            group.state, group.transfer = GroupState.READY, None

    def _end(self, group: _ChildGroup, reason: str) -> None:
        """Disarms and drops a group; the reason is kept for the next call with its name."""
        with self._lock:
            if self._groups.get(group.name) is group:
                del self._groups[group.name]
                self._drop_reasons[group.name] = reason
                while len(self._drop_reasons) > MAX_DROP_REASONS:
                    self._drop_reasons.pop(next(iter(self._drop_reasons)))
        group.child.kill(reason)

    def _remove(self, group: _ChildGroup) -> None:
        with self._lock:
            if self._groups.get(group.name) is group:
                del self._groups[group.name]


class SubprocessReceived:
    """A `Received` in shared memory, or in the file that it was received into."""

    def __init__(
        self, order: ReceiveOrder, target: BlockLease | FileRegion, ended: TransferEnded
    ) -> None:
        self.buckets = len(order.plans)
        self.nbytes = order.nbytes
        self.secs = ended.secs
        self.digests = ended.digests
        self._order = order
        self._target: BlockLease | FileRegion | None = target

    def tensors(self) -> dict[str, torch.Tensor]:
        target, plan = self._target, self._order.merged_plan
        if target is None:
            raise ValueError("the received memory was already released")
        if isinstance(target, BlockLease):
            return tensor_views(plan, target.tensor())
        with open(target.path, "r+b") as file:
            return tensor_views(plan, map_file(file.fileno(), os.fstat(file.fileno()).st_size))

    def close(self) -> None:
        self._target = None


def _check_trainer(group: _ChildGroup, timeout_secs: float, *, ping: bool) -> dict[str, int]:
    """The child's answer to CheckTrainer; {} if the child does not answer."""
    command = CheckTrainer(group.child.next_number(), group.name, ping)
    try:
        return group.child.call(command, timeout_secs).values
    except GroupError:
        return {}


def _group_status(group: _ChildGroup) -> dict[str, Any]:
    transfer = group.transfer
    messages_done, bytes_received = 0, 0
    if transfer is not None:
        progress = transfer.progress()
        messages_done, bytes_received = progress.messages_done, progress.bytes_received
    return {
        "group_name": group.name,
        "backend": group.rendezvous.backend,
        "rank": group.rendezvous.rank,
        "world_size": group.rendezvous.world_size,
        "owner": group.owner,
        "owner_gone": bool(_check_trainer(group, QUERY_TIMEOUT_SECS, ping=False).get("owner_gone")),
        "state": group.state.value,
        "process": group.child.pid,
        "messages_done": messages_done,
        "bytes_received": bytes_received,
        "bytes_come": bytes_received,  # the old name, for one release
    }
