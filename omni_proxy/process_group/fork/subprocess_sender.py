"""A `Sender` in a child process. Sending a file needs no torch in this process.

Invariant: a child whose send failed or was aborted is killed; a peer can block only that child.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from omni_proxy.process_group.broadcast.buffers import BlockLease, SharedBlockPool
from omni_proxy.process_group.broadcast.mapped_file import FileRegion, region_span
from omni_proxy.process_group.broadcast.transfer import ReceiveOrder, Transfer
from omni_proxy.process_group.fork.child_process import (
    QUERY_TIMEOUT_SECS,
    REPORT_GRACE_SECS,
    START_SECS,
    ChildEnded,
    ChildPool,
    TransferEvent,
)
from omni_proxy.process_group.fork.ipc import (
    CloseSender,
    OpenSender,
    ProgressReport,
    Reply,
    Send,
    TransferEnded,
    WaitForRanks,
)
from omni_proxy.process_group.rendezvous import HostedRendezvous
from omni_proxy.process_group.sender import READY_SECS, SendResult, tensor_bytes
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan

if TYPE_CHECKING:
    import torch

OPEN_SECS: Final = 10.0


class SubprocessSender:
    """Rank 0 of a group, in a child. The constructor opens the store, or raises GroupError."""

    def __init__(
        self, rendezvous: HostedRendezvous, children: ChildPool, blocks: SharedBlockPool
    ) -> None:
        self._rendezvous = rendezvous
        self._blocks = blocks
        self._child = children.start_child()
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._child.require_ready(START_SECS)
            reply = self._call(OpenSender(self._child.next_number(), rendezvous), OPEN_SECS)
        except GroupError:
            self.close()
            raise
        self.port = reply.values["port"]

    def wait_for_ranks(self) -> None:
        command = WaitForRanks(self._child.next_number())
        self._call(command, self._rendezvous.timeout_s + REPORT_GRACE_SECS)

    def send(
        self, plans: Sequence[TensorPlan], source: FileRegion | Mapping[str, torch.Tensor]
    ) -> Transfer[SendResult]:
        starts = source.starts if isinstance(source, FileRegion) else None
        order = ReceiveOrder(tuple(plans), starts=starts)
        command = Send(self._child.next_number(), order.plans)
        lease: BlockLease | None = None
        if isinstance(source, FileRegion):
            region_span(source, order.plans)
            command.region = replace(source, path=os.path.abspath(source.path))
        else:
            lease = _copy_to_shared_block(order, source, self._blocks)
            command.block = lease.block.number
        transfer: Transfer[SendResult] = Transfer(order, self._child.kill)
        self._child.subscribe(command.number, _event_handler(transfer, lease))
        try:
            self._call(command, READY_SECS, *([lease.block.descriptor] if lease else []))
        except GroupError:
            self._child.unsubscribe(command.number)
            raise
        return transfer

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # End the group in an orderly way first, if the child still answers.
        with suppress(GroupError):
            self._child.call(CloseSender(self._child.next_number()), QUERY_TIMEOUT_SECS)
        self._child.kill("the sender was closed")

    def _call(
        self, command: OpenSender | WaitForRanks | Send, timeout_secs: float, *descriptors: int
    ) -> Reply:
        """Raises GroupError with the child's error, or if the child has ended or hangs."""
        reply = self._child.call(command, timeout_secs, *descriptors)
        if reply.error is not None:
            raise GroupError(reply.error, group_dropped=reply.dropped)
        return reply


def _event_handler(
    transfer: Transfer[SendResult], lease: BlockLease | None
) -> Callable[[TransferEvent | ChildEnded], None]:
    leases = [lease]  # cleared when the send has ended, to keep the memory until then

    def on_event(event: TransferEvent | ChildEnded) -> None:
        match event:
            case ProgressReport(messages_done=messages_done, bytes_received=bytes_sent):
                transfer.report_progress(messages_done, bytes_sent)
                return
            case TransferEnded(error=None, secs=secs):
                transfer.finish(SendResult(transfer.order.nbytes, secs))
            case TransferEnded(error=error):
                transfer.fail(GroupError(str(error), group_dropped=True))
            case ChildEnded():
                transfer.fail(event)
        leases.clear()

    return on_event


def _copy_to_shared_block(
    order: ReceiveOrder, tensors: Mapping[str, torch.Tensor], blocks: SharedBlockPool
) -> BlockLease:
    """Copies the announced tensors to shared memory."""
    # Validate them before taking the memory.
    flat = [tensor_bytes(spec, tensors) for spec in order.merged_plan.tensors]
    lease = blocks.take(order.merged_plan.block_bytes)
    block = lease.tensor()
    for part, offset in zip(flat, order.merged_plan.offsets, strict=True):
        block[offset : offset + part.numel()].copy_(part)
    return lease
