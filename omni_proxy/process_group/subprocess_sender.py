"""Rank 0 of a group of our own, in a child process. See `Sender`. No torch here to send a file.

Invariant: a child that failed, or was stopped at work, is ended; a peer holds only that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from omni_proxy.process_group.child_handle import ChildEnded, Event
from omni_proxy.process_group.child_pool import START_SECS, Children
from omni_proxy.process_group.ipc import Ended, Leave, Meet, Moved, Open, Reply, Send
from omni_proxy.process_group.mapped_file import FileRegion, span
from omni_proxy.process_group.rendezvous import Meeting
from omni_proxy.process_group.sender import Sent
from omni_proxy.process_group.shared_buffers import Lease, SharedBlocks
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan
from omni_proxy.process_group.thread_sender import READY_SECS, bytes_of
from omni_proxy.process_group.transfer import ReceiveOrder, Transfer

if TYPE_CHECKING:
    import torch

SLACK_SECS: Final = 3.0
ANSWER_SECS: Final = 2.0
OPEN_SECS: Final = 10.0


class ProcessSender:
    """Opens the store; raises GroupError where that cannot be."""

    def __init__(self, meeting: Meeting, children: Children, blocks: SharedBlocks) -> None:
        self._meeting = meeting
        self._blocks = blocks
        self._child = children.take()
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._child.require_ready(START_SECS)
            reply = self._asked(Open(self._child.number(), meeting), OPEN_SECS)
        except GroupError:
            self.close()
            raise
        self.port = reply.found["port"]

    def meet(self) -> None:
        self._asked(Meet(self._child.number()), self._meeting.timeout_s + SLACK_SECS)

    def send(
        self, plans: Sequence[TensorPlan], source: FileRegion | Mapping[str, torch.Tensor]
    ) -> Transfer[Sent]:
        starts = source.starts if isinstance(source, FileRegion) else None
        order = ReceiveOrder(tuple(plans), starts=starts)
        send = Send(self._child.number(), order.plans)
        lease: Lease | None = None
        if isinstance(source, FileRegion):
            span(source, order.plans)
            send.place = replace(source, path=os.path.abspath(source.path))
        else:
            lease = _filled(order, source, self._blocks)
            send.block = lease.block.number
        underway: Transfer[Sent] = Transfer(order, self._child.kill)
        self._child.follow(send.number, _listener(underway, lease))
        try:
            self._asked(send, READY_SECS, *([lease.block.descriptor] if lease else []))
        except GroupError:
            self._child.unfollow(send.number)
            raise
        return underway

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # In good order, where that is to be had.
        with suppress(GroupError):
            self._child.call(Leave(self._child.number()), ANSWER_SECS)
        self._child.kill("the sender was closed")

    def _asked(self, order: Open | Meet | Send, within_secs: float, *descriptors: int) -> Reply:
        """Raises GroupError with what went wrong, in the child or with it."""
        reply = self._child.call(order, within_secs, *descriptors)
        if reply.error is not None:
            raise GroupError(reply.error, group_dropped=reply.dropped)
        return reply


def _listener(
    underway: Transfer[Sent], lease: Lease | None
) -> Callable[[Event | ChildEnded], None]:
    box = [lease]  # the memory is wanted until the end

    def heard(event: Event | ChildEnded) -> None:
        match event:
            case Moved(messages_done=messages_done, bytes_come=bytes_gone):
                underway.moved(messages_done, bytes_gone)
                return
            case Ended(error=None, secs=secs):
                underway.finish(Sent(underway.order.nbytes, secs))
            case Ended(error=why):
                underway.fail(GroupError(str(why), group_dropped=True))
            case ChildEnded():
                underway.fail(event)
        box.clear()

    return heard


def _filled(
    order: ReceiveOrder, tensors: Mapping[str, torch.Tensor], blocks: SharedBlocks
) -> Lease:
    """The announced tensors in shared memory."""
    # Looked at before memory is taken for them.
    flat = [bytes_of(spec, tensors) for spec in order.whole.tensors]
    lease = blocks.take(order.whole.block_bytes)
    block = lease.tensor()
    for part, offset in zip(flat, order.whole.offsets, strict=True):
        block[offset : offset + part.numel()].copy_(part)
    return lease
