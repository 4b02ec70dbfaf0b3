"""Rank 0 of a group of our own, in this process. See `Sender`.

opened -> meeting -> ready <-> sending; any failure drops the group. Knows no HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.process_group.backend import Backend, lead, own_store, require_backend, told
from omni_proxy.process_group.blocking_call import AbandonedThreads, BlockingCall
from omni_proxy.process_group.mapped_file import FileRegion, mapped_to_read, read_ahead, span
from omni_proxy.process_group.receive import SLOWEST_BYTES_PER_SEC, Moved
from omni_proxy.process_group.rendezvous import Meeting
from omni_proxy.process_group.sender import Sent
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan, TensorSpec
from omni_proxy.process_group.transfer import ReceiveOrder, Transfer, run_underway

if TYPE_CHECKING:
    import torch

READY_SECS: Final = 60.0


class LocalSender:
    """See `Sender`. `stall_secs`: how long nothing may leave, beside what a slow link needs."""

    def __init__(self, meeting: Meeting, stall_secs: float) -> None:
        if meeting.world_size < 2:
            raise GroupError(f"world_size {meeting.world_size}: we and one receiver are at least 2")
        require_backend(meeting.backend)
        self._meeting = meeting
        self._stall_secs = stall_secs
        self._lock = threading.Lock()
        self._threads = AbandonedThreads()
        self._why: str | None = None
        self._busy = False
        self._store: Any = own_store(meeting)
        self._transport: Backend | None = None
        self.port: int = self._store.port

    def meet(self) -> None:
        meeting, store = self._meeting, self._store
        until = time.monotonic() + meeting.timeout_s

        def meet(_: BlockingCall[Backend]) -> Backend:
            try:
                return lead(meeting, store, meeting.timeout_s)
            except RuntimeError as error:
                raise GroupError(told(error)) from None

        def why_stop() -> str | None:
            if time.monotonic() > until:
                return f"not all {meeting.world_size} ranks came within {meeting.timeout_s:g} s"
            return self._why

        with self._alone():
            if self._transport is not None:
                raise GroupError("the ranks have met already")
            errand = BlockingCall(f"weights-meet-{meeting.group_name}", meet)
            self._transport = self._threads.wait_for(errand, why_stop)

    def send(
        self, plans: Sequence[TensorPlan], source: FileRegion | Mapping[str, torch.Tensor]
    ) -> Transfer[Sent]:
        if isinstance(source, FileRegion):
            order = ReceiveOrder(tuple(plans), starts=source.starts)
            return self.broadcast(order, _of_file(order, source))
        order = ReceiveOrder(tuple(plans))
        return self.broadcast(order, _of(order, source))

    def broadcast(self, order: ReceiveOrder, parts: list[torch.Tensor]) -> Transfer[Sent]:
        """`parts`: the bytes of each message."""
        underway: Transfer[Sent] = Transfer(order, self._stop)

        def transfer(posted: threading.Event, moved: Moved) -> Sent:
            with self._alone():
                if self._transport is None:
                    raise GroupError("the ranks have not met yet: call meet first")
                posted.set()
                return self._send(order, parts, moved)

        run_underway(f"weights-send-{self._meeting.group_name}", underway, transfer, READY_SECS)
        return underway

    def close(self) -> None:
        self._stop("the sender was closed")
        with self._lock:
            box = [each for each in (self._transport, self._store) if each is not None]
            self._transport = self._store = None
        self._threads.drop(f"weights-drop-{self._meeting.group_name}", _end, box)

    def _stop(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thing at a time, and none after a failure: the group would only hang."""
        with self._lock:
            if self._why is not None:
                raise GroupError(f"this sender has ended: {self._why}", group_dropped=True)
            if self._busy:
                raise GroupError("this sender is at work: one thing at a time")
            self._busy = True
        try:
            yield
        except GroupError as error:
            if error.group_dropped:
                self._stop(str(error))
            raise
        finally:
            self._busy = False

    def _send(self, order: ReceiveOrder, parts: list[torch.Tensor], moved: Moved) -> Sent:
        began = time.monotonic()
        errand = self._started(parts)
        watch = _Watch(order, self._stall_secs)

        def why_stop() -> str | None:
            if watch.look(errand.done):
                moved(errand.done, watch.bytes_gone)
            return self._why or watch.why_stop()

        try:
            self._threads.wait_for(errand, why_stop)
        except GroupError as error:
            total = len(order.whole.messages)
            raise GroupError(
                f"group {self._meeting.group_name!r}: the send failed after {errand.done} of "
                f"{total} messages: {error}",
                group_dropped=True,
            ) from None
        return Sent(order.nbytes, time.monotonic() - began)

    def _started(self, parts: list[torch.Tensor]) -> BlockingCall[None]:
        transport, timeout_secs = self._transport, self._meeting.timeout_s
        assert transport is not None

        def send(errand: BlockingCall[None]) -> None:
            def landed(count: int) -> None:
                errand.done = count

            try:
                transport.send(parts, landed, timeout_secs)
            except RuntimeError as error:
                raise GroupError(told(error)) from None

        return BlockingCall(f"weights-broadcast-{self._meeting.group_name}", send)


class _Watch:
    """How much has left, and whether that has taken too long.

    A message shows no progress before all of it has left.
    """

    def __init__(self, order: ReceiveOrder, stall_secs: float) -> None:
        self.bytes_gone = 0
        self._messages = order.whole.messages
        self._stall_secs = stall_secs
        self._done = 0
        self._moved_at = time.monotonic()

    def look(self, done: int) -> bool:
        moved = done > self._done
        if moved:
            self.bytes_gone += sum(each.nbytes for each in self._messages[self._done : done])
            self._done, self._moved_at = done, time.monotonic()
        return moved

    def why_stop(self) -> str | None:
        if self._done == len(self._messages):
            return None
        message = self._messages[self._done]
        patience = self._stall_secs + message.nbytes / SLOWEST_BYTES_PER_SEC
        if time.monotonic() - self._moved_at < patience:
            return None
        return f"{message.what} was not taken within {patience:.0f} s"


def _end(box: list[Any]) -> None:
    for each in box:
        if hasattr(each, "abort"):
            each.abort()
    box.clear()


def _of_file(order: ReceiveOrder, place: FileRegion) -> list[torch.Tensor]:
    start, end = span(place, order.plans)
    whole = mapped_to_read(place.path, end)
    read_ahead(whole, start, end)
    return [whole[each.offset : each.offset + each.nbytes] for each in order.whole.messages]


def _of(order: ReceiveOrder, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    import torch

    parts: list[torch.Tensor] = []
    for plan in order.plans:
        flat = [bytes_of(spec, tensors) for spec in plan.tensors]
        parts += flat if len(plan.messages) == len(flat) else [torch.cat(flat)]
    return parts


def bytes_of(spec: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The announced tensor as flat uint8; raises GroupError where it is another than announced."""
    import torch

    tensor = tensors.get(spec.name)
    if tensor is None:
        raise GroupError(f"tensor {spec.name!r} is announced, but not among those to send")
    if tensor.dtype != getattr(torch, spec.dtype) or tuple(tensor.shape) != spec.shape:
        raise GroupError(
            f"tensor {spec.name!r} is announced as {spec.dtype} {list(spec.shape)}, and is "
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
