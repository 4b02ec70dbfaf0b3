"""The protocol of a trainer's process group at one of its ranks: init, receive, destroy.

joining (`rendezvous.py`, `broadcast/backend.py`) -> ready <-> receiving announced tensors
(`tensor_plan.py`, `broadcast/receive.py`). Invariant: any failure, and the trainer's end, drops the
group, because a group that failed once hangs later. All calls block, so each needs its own thread.
`destroy` and `close` may be called while another thread is inside `init` or `receive`: that call
then raises GroupError within POLL_SECS. It has no HTTP, model or scheduler. The proxy's state
machine for all members of a group is in `weight_sync/protocol/trainer_group.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from omni_proxy.process_group.blocking_call import AbandonedThreads, BlockingCall, CancelToken
from omni_proxy.process_group.broadcast.backend import (
    Backend,
    error_summary,
    join_group,
    require_backend,
)
from omni_proxy.process_group.broadcast.buffers import KEEP_BYTES, BufferPool
from omni_proxy.process_group.broadcast.receive import (
    OWNER_GONE,
    BlockReceive,
    ProgressCallback,
    ReceiveContext,
    ReceiveResult,
    sentinel_for,
)
from omni_proxy.process_group.broadcast.transfer import (
    LocalReceived,
    ReceiveOrder,
    Transfer,
    start_transfer,
)
from omni_proxy.process_group.rendezvous import (
    Rendezvous,
    StoreConnection,
    connect_store,
    validated_address,
)
from omni_proxy.process_group.tensor_plan import Announced, GroupError, make_plan

if TYPE_CHECKING:
    import torch

__all__ = ["GroupError", "GroupLimits", "Groups", "Rendezvous"]

log = logging.getLogger(__name__)

MAX_DROP_REASONS: Final = 32


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Timeouts of groups, in seconds.

    `stall_secs`: ends a receive without progress. `first_byte_secs`: an armed receive's wait for
    its first byte (None: `stall_secs`). `silent_secs`: how long a port may accept connections
    without answering as a store. `ping_secs`: answer time of the present trainer if another one
    requests its group's name. `keep_bytes`: unused receive memory that is kept. `receive_secs`:
    maximum duration of a receive, even with steady progress.
    """

    stall_secs: float = 30.0
    # A trainer's store resolves its clients' names; with an unreachable DNS each takes 10 s.
    silent_secs: float = 12.0
    ping_secs: float = 2.0
    keep_bytes: int = KEEP_BYTES
    first_byte_secs: float | None = None
    receive_secs: float = 3600.0


class GroupState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    ARMING = "arming"  # only in the parent of a receiver process
    RECEIVING = "receiving"


class _Joined(Protocol):
    state: GroupState


_Group = TypeVar("_Group", bound=_Joined)


def ready_group(groups: Mapping[str, _Group], drop_reasons: Mapping[str, str], name: str) -> _Group:
    """The group, if it may receive now. Raises GroupError. `drop_reasons`: of dropped groups."""
    group = groups.get(name)
    if group is None and name in drop_reasons:
        raise GroupError(
            f"group {name!r} is gone ({drop_reasons[name]}): call init_weights_update_group again"
        )
    if group is None:
        raise GroupError(f"group {name!r} is not initialized: call init_weights_update_group first")
    if group.state is not GroupState.READY:
        raise GroupError(f"group {name!r} is {group.state}: one receive at a time")
    return group


class _JoinedGroup:
    """State of one group; its fields change under the lock of `Groups`.

    `stop`: the reason why the running step has to end. `receive`: the running receive.
    """

    __slots__ = ("address", "backend", "connection", "receive", "rendezvous", "state", "stop")

    def __init__(self, rendezvous: Rendezvous, address: tuple[str, int]) -> None:
        self.rendezvous = rendezvous
        self.address = address
        self.state = GroupState.JOINING
        self.backend: Backend | None = None
        self.connection: StoreConnection | None = None
        self.stop: str | None = None
        self.receive: BlockReceive | None = None

    def owner(self) -> str:
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def owner_gone(self) -> bool:
        return self.connection is not None and self.connection.has_ended()


class Groups:
    """All groups of one rank. Every method may be called from any thread."""

    def __init__(self, limits: GroupLimits | None = None) -> None:
        self._limits = limits or GroupLimits()
        self._lock = threading.Lock()
        self._groups: dict[str, _JoinedGroup] = {}
        self._drop_reasons: dict[str, str] = {}
        self._threads = AbandonedThreads()
        self._buffers = BufferPool(self._limits.keep_bytes)
        self._closed = False

    def init(self, rendezvous: Rendezvous, stop: CancelToken | None = None) -> None:
        """Joins the trainer's group; returns when all ranks have joined (NCCL: this rank).

        A group of the same name is replaced if its trainer has disconnected. Raises GroupError if
        that trainer is alive, or if joining fails; a failed group is removed. `stop` cancels the
        call.
        """
        address = validated_address(rendezvous)
        require_backend(rendezvous.backend, rendezvous.device)
        self._replace_dead_group(rendezvous.group_name)
        group = _JoinedGroup(rendezvous, address)
        with self._lock:
            if self._closed:
                raise GroupError("the replica is shutting down")
            if rendezvous.group_name in self._groups:
                raise GroupError(f"group {rendezvous.group_name!r} is already being initialized")
            self._groups[rendezvous.group_name] = group
        joined = False
        try:
            if stop is not None:
                stop.on_cancel(lambda reason: setattr(group, "stop", group.stop or reason))
            self._join(group)
            joined = True
        finally:
            if stop is not None:
                stop.on_cancel(None)
            self._finish_step(group, keep=joined)
        if group.stop is not None:
            raise GroupError(group.stop)

    def destroy(self, group_name: str) -> None:
        """Ends a group in any state; raises GroupError if there is none.

        Destroying a group that was dropped by a failure succeeds once.
        """
        with self._lock:
            was_dropped = self._drop_reasons.pop(group_name, None) is not None
            group = self._groups.pop(group_name, None)
            if group is not None:
                group.stop = f"group {group_name!r} was destroyed"
        if group is None and not was_dropped:
            raise GroupError("The group to be destroyed does not exist.")
        if group is not None and group.state is GroupState.READY:
            self._drop(group)

    def receive(
        self,
        group_name: str,
        specs: Iterable[Announced],
        load_format: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> dict[str, torch.Tensor]:
        """Receives the announced tensors; returns them by name.

        Their memory is reused only after the last of them was dropped. Raises GroupError; with
        `group_dropped` the group no longer exists, otherwise it is unchanged.
        `progress(messages_done, bytes_received)` is called in the calling thread.
        """
        plan = make_plan(specs, load_format)
        group = self._claim(group_name)
        return self._receive(group, ReceiveOrder((plan,)), threading.Event(), progress).tensors()

    def arm(
        self, group_name: str, order: ReceiveOrder, *, ready_secs: float
    ) -> Transfer[LocalReceived]:
        """Returns when the first receive is posted; a separate thread runs the receive.

        If it raises GroupError, nothing is armed; with `group_dropped` the group is dropped too.
        """
        group = self._claim(group_name)
        if group.owner_gone():
            self._record_drop(group, OWNER_GONE, dropped=True)
            self._finish_step(group, keep=False)
            raise GroupError(f"group {group_name!r}: {OWNER_GONE}", group_dropped=True)

        def stop(reason: str) -> None:
            group.stop = group.stop or reason

        def run(posted: threading.Event, on_progress: ProgressCallback) -> LocalReceived:
            return LocalReceived(order, self._receive(group, order, posted, on_progress))

        transfer: Transfer[LocalReceived] = Transfer(order, stop)
        start_transfer(f"weights-watch-{group_name}", transfer, run, ready_secs)
        return transfer

    def owner_gone(self, group_name: str) -> bool:
        """Whether the trainer of this group has closed its store. Doesn't block."""
        with self._lock:
            group = self._groups.get(group_name)
        return group is not None and group.owner_gone()

    def owner_answers(self, group_name: str) -> bool:
        """Whether the trainer's store answers a ping within `ping_secs`."""
        with self._lock:
            group = self._groups.get(group_name)
        if group is None:
            return False
        return group.connection is None or group.connection.answers(self._limits.ping_secs)

    def _receive(
        self,
        group: _JoinedGroup,
        order: ReceiveOrder,
        posted: threading.Event,
        on_progress: ProgressCallback | None,
    ) -> ReceiveResult:
        result: ReceiveResult | None = None
        receive: BlockReceive | None = None
        try:
            assert group.backend is not None
            block = self._block_for(order, group.backend)
            sentinel = sentinel_for(group.rendezvous.group_name, group.rendezvous.world_size)
            receive = BlockReceive(
                group.backend, order.merged_plan, block, sentinel, digests=order.digests
            )
            group.receive = receive
            result = receive.run(self._receive_context(group), on_progress, posted.set)
        except GroupError as error:
            self._record_drop(group, str(error), dropped=error.group_dropped)
            raise
        finally:
            group.receive = None
            self._finish_step(group, keep=result is not None or receive is None)
        return result

    def _block_for(self, order: ReceiveOrder, backend: Backend) -> torch.Tensor:
        try:
            if order.allocate is None:
                return backend.allocate(order.merged_plan.block_bytes, self._buffers)
            return order.allocate(order.merged_plan)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            raise GroupError(f"no memory for the announced tensors: {error}") from None

    def status(self) -> dict[str, Any]:
        """JSON-ready: the groups and their progress, threads blocked in torch, kept memory."""
        with self._lock:
            groups = [_group_status(group) for group in self._groups.values()]
        return {
            "groups": groups,
            "abandoned_threads": self._threads.names(),
            "kept_bytes": self._buffers.kept_bytes(),
        }

    def close(self) -> None:
        """Ends all groups permanently and frees memory; blocked calls in other threads fail."""
        with self._lock:
            self._closed = True
            names = list(self._groups)
        for name in names:
            with suppress(GroupError):  # another thread destroyed it first
                self.destroy(name)
        self._buffers.clear()

    def _replace_dead_group(self, group_name: str) -> None:
        with self._lock:
            existing = self._groups.get(group_name)
        if existing is None:
            return
        if self.owner_answers(group_name):
            raise GroupError(
                f"group {group_name!r} is {existing.state} for the trainer at {existing.owner()}, "
                "which is alive: destroy that group first, or use another group_name"
            )
        log.warning(
            "process_group_replaced group=%s old_trainer=%s reason=trainer_gone",
            group_name,
            existing.owner(),
        )
        with suppress(GroupError):  # it has ended since the check
            self.destroy(group_name)

    def _join(self, group: _JoinedGroup) -> None:
        deadline = time.monotonic() + group.rendezvous.timeout_s
        connections: list[StoreConnection] = []
        join = _join_call(group, connections, deadline, self._limits.silent_secs)
        call = BlockingCall(f"weights-init-{group.rendezvous.group_name}", join)

        def stop_reason() -> str | None:
            if group.stop is not None:
                return group.stop
            if connections and connections[0].has_ended():
                return f"the trainer at {group.owner()} has gone, while {call.step}"
            if time.monotonic() > deadline:
                return f"no group within {group.rendezvous.timeout_s:g} s, while {call.step}"
            group.connection = connections[0] if connections else None
            return None

        try:
            group.backend = self._threads.wait_for(call, stop_reason)
        except GroupError:
            for connection in connections:
                connection.close()
            raise
        group.connection = connections[0]

    def _claim(self, group_name: str) -> _JoinedGroup:
        with self._lock:
            group = ready_group(self._groups, self._drop_reasons, group_name)
            group.state = GroupState.RECEIVING
            return group

    def _receive_context(self, group: _JoinedGroup) -> ReceiveContext:
        limits = self._limits
        return ReceiveContext(
            group_name=group.rendezvous.group_name,
            timeout_secs=limits.receive_secs,
            stall_secs=limits.stall_secs,
            first_byte_secs=limits.first_byte_secs or limits.stall_secs,
            stop_reason=lambda: group.stop,
            owner_gone=group.owner_gone,
            threads=self._threads,
        )

    def _record_drop(self, group: _JoinedGroup, reason: str, *, dropped: bool) -> None:
        with self._lock:
            # A destroyed group needs no reason, because its trainer requested that.
            if not dropped or self._groups.get(group.rendezvous.group_name) is not group:
                return
            self._drop_reasons[group.rendezvous.group_name] = reason
            while len(self._drop_reasons) > MAX_DROP_REASONS:
                self._drop_reasons.pop(next(iter(self._drop_reasons)))

    def _finish_step(self, group: _JoinedGroup, *, keep: bool) -> None:
        """Ends a blocking step: the group becomes ready again, or is dropped."""
        name = group.rendezvous.group_name
        with self._lock:
            keep = keep and group.stop is None
            if keep:
                group.state = GroupState.READY
                self._drop_reasons.pop(name, None)
            elif self._groups.get(name) is group:
                del self._groups[name]
        if not keep:
            self._drop(group)

    def _drop(self, group: _JoinedGroup) -> None:
        connection, group.connection = group.connection, None
        if connection is not None:
            connection.close()
        references: list[Backend] = []
        if group.backend is not None:
            references.append(group.backend)
            group.backend = None
            name = f"weights-drop-{group.rendezvous.group_name}"
            self._threads.drop(name, _abort_group, references)


def _join_call(
    group: _JoinedGroup, connections: list[StoreConnection], deadline: float, silent_secs: float
) -> Callable[[BlockingCall[Backend]], Backend]:
    """Returns a function that joins the group and appends its store connection to
    `connections`."""
    rendezvous, address, owner = group.rendezvous, group.address, group.owner()

    def join(call: BlockingCall[Backend]) -> Backend:
        call.step = f"waiting for the trainer's store at {owner}"
        connection = connect_store(
            address, silent_secs, lambda: call.abandoned or time.monotonic() > deadline
        )
        connections.append(connection)
        if call.abandoned:
            connection.close()
            raise GroupError("cancelled")
        call.step = f"waiting for all {rendezvous.world_size} ranks of the group"
        try:
            return join_group(rendezvous, address, max(deadline - time.monotonic(), 1.0))
        except RuntimeError as error:
            raise GroupError(f"no group, while {call.step}: {error_summary(error)}") from None

    return join


def _abort_group(references: list[Backend]) -> None:
    references[0].abort()
    references.clear()


def _group_status(group: _JoinedGroup) -> dict[str, Any]:
    monitor = group.receive.monitor if group.receive else None
    bytes_received = monitor.bytes_received if monitor else 0
    return {
        "group_name": group.rendezvous.group_name,
        "backend": group.rendezvous.backend,
        "rank": group.rendezvous.rank,
        "world_size": group.rendezvous.world_size,
        "owner": group.owner(),
        "owner_gone": group.owner_gone(),
        "state": group.state.value,
        "messages_done": monitor.messages_done if monitor else 0,
        "bytes_received": bytes_received,
        "bytes_come": bytes_received,  # the old name, for one release
    }
