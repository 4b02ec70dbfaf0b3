"""The sender, rank 0 of a group: its store, its rendezvous, and broadcasts of memory or a file.

opened -> joining -> ready <-> sending. All calls block and are safe from any thread. Invariant:
any failure drops the group, and a sender that failed stays closed: the next send needs a new one.
A peer that stops or dies makes the send fail with a GroupError.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from omni_proxy.process_group.blocking_call import AbandonedThreads, BlockingCall
from omni_proxy.process_group.broadcast.backend import (
    Backend,
    error_summary,
    host_group,
    open_store,
    require_backend,
)
from omni_proxy.process_group.broadcast.mapped_file import (
    FileRegion,
    map_file_to_read,
    read_ahead,
    region_span,
)
from omni_proxy.process_group.broadcast.receive import MIN_BYTES_PER_SEC, ProgressCallback
from omni_proxy.process_group.broadcast.transfer import (
    Progress,
    ReceiveOrder,
    Transfer,
    start_transfer,
)
from omni_proxy.process_group.rendezvous import HostedRendezvous
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["FileRegion", "HostedRendezvous", "PendingSend", "SendResult", "Sender", "ThreadSender"]

READY_SECS: Final = 60.0


@dataclass(frozen=True, slots=True)
class SendResult:
    """All bytes were sent. Whether they were received, only the receivers report."""

    nbytes: int
    secs: float


class PendingSend(Protocol):
    """One running broadcast of some buckets; safe from any thread."""

    def progress(self) -> Progress: ...

    def fault(self) -> GroupError | None:
        """The error if the send has failed, otherwise None. Doesn't block."""
        ...

    def wait(self, secs: float) -> SendResult:
        """Raises GroupError if the send fails or takes longer than `secs`; the group is dropped."""
        ...

    def abort(self, reason: str) -> None: ...


class Sender(Protocol):
    """Rank 0 of a group. The caller that opens a sender has to close it."""

    @property
    def port(self) -> int:
        """The store's port: the master_port of the other ranks."""
        ...

    def wait_for_ranks(self) -> None:
        """Returns when all ranks have joined. Raises GroupError at the rendezvous's timeout."""
        ...

    def send(
        self, plans: Sequence[TensorPlan], source: FileRegion | Mapping[str, torch.Tensor]
    ) -> PendingSend:
        """Starts to broadcast the announced tensors, in the order and form of the plans.

        The source is tensors by name, or a file with bucket i's block at byte `starts[i]`. Raises
        GroupError, before any byte is sent, if the source lacks a tensor or its size differs.
        """
        ...

    def close(self) -> None:
        """Ends the group and its store, in any state."""
        ...


class ThreadSender:
    """A `Sender` whose blocking threads run in this process.

    `stall_secs`: how long a message may make no progress, beyond the time that a slow link needs.
    """

    def __init__(self, rendezvous: HostedRendezvous, stall_secs: float) -> None:
        if rendezvous.world_size < 2:
            raise GroupError(
                f"world_size {rendezvous.world_size}: rank 0 and one receiver are at least 2"
            )
        require_backend(rendezvous.backend)
        self._rendezvous = rendezvous
        self._stall_secs = stall_secs
        self._lock = threading.Lock()
        self._threads = AbandonedThreads()
        self._end_reason: str | None = None
        self._busy = False
        self._store: Any = open_store(rendezvous)
        self._backend: Backend | None = None
        self.port: int = self._store.port

    def wait_for_ranks(self) -> None:
        rendezvous, store = self._rendezvous, self._store
        deadline = time.monotonic() + rendezvous.timeout_s

        def join(_: BlockingCall[Backend]) -> Backend:
            try:
                return host_group(rendezvous, store, rendezvous.timeout_s)
            except RuntimeError as error:
                raise GroupError(error_summary(error)) from None

        def stop_reason() -> str | None:
            if time.monotonic() > deadline:
                count, secs = rendezvous.world_size, rendezvous.timeout_s
                return f"not all {count} ranks joined within {secs:g} s"
            return self._end_reason

        with self._exclusive():
            if self._backend is not None:
                raise GroupError("the ranks have already joined")
            call = BlockingCall(f"weights-meet-{rendezvous.group_name}", join)
            self._backend = self._threads.wait_for(call, stop_reason)

    def send(
        self, plans: Sequence[TensorPlan], source: FileRegion | Mapping[str, torch.Tensor]
    ) -> Transfer[SendResult]:
        if isinstance(source, FileRegion):
            order = ReceiveOrder(tuple(plans), starts=source.starts)
            return self.broadcast(order, _file_messages(order, source))
        order = ReceiveOrder(tuple(plans))
        return self.broadcast(order, _tensor_messages(order, source))

    def broadcast(self, order: ReceiveOrder, parts: list[torch.Tensor]) -> Transfer[SendResult]:
        """Starts a broadcast. `parts`: the bytes of each message."""
        transfer: Transfer[SendResult] = Transfer(order, self._stop)

        def run(posted: threading.Event, on_progress: ProgressCallback) -> SendResult:
            with self._exclusive():
                if self._backend is None:
                    raise GroupError("the ranks have not joined yet: call wait_for_ranks first")
                posted.set()
                return self._send(order, parts, on_progress)

        name = f"weights-send-{self._rendezvous.group_name}"
        start_transfer(name, transfer, run, READY_SECS)
        return transfer

    def close(self) -> None:
        self._stop("the sender was closed")
        with self._lock:
            references = [part for part in (self._backend, self._store) if part is not None]
            self._backend = self._store = None
        self._threads.drop(f"weights-drop-{self._rendezvous.group_name}", _abort_all, references)

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._end_reason = self._end_reason or reason

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One operation at a time, and none after a failure, after which the group would hang."""
        with self._lock:
            if self._end_reason is not None:
                raise GroupError(f"this sender has ended: {self._end_reason}", group_dropped=True)
            if self._busy:
                raise GroupError("this sender is busy: one operation at a time")
            self._busy = True
        try:
            yield
        except GroupError as error:
            if error.group_dropped:
                self._stop(str(error))
            raise
        finally:
            self._busy = False

    def _send(
        self, order: ReceiveOrder, parts: list[torch.Tensor], on_progress: ProgressCallback
    ) -> SendResult:
        started = time.monotonic()
        call = self._start_broadcast(parts)
        monitor = _SendMonitor(order, self._stall_secs)

        def stop_reason() -> str | None:
            if monitor.update(call.done):
                on_progress(call.done, monitor.bytes_sent)
            return self._end_reason or monitor.stall_reason()

        try:
            self._threads.wait_for(call, stop_reason)
        except GroupError as error:
            total = len(order.merged_plan.messages)
            raise GroupError(
                f"group {self._rendezvous.group_name!r}: the send failed after {call.done} of "
                f"{total} messages: {error}",
                group_dropped=True,
            ) from None
        return SendResult(order.nbytes, time.monotonic() - started)

    def _start_broadcast(self, parts: list[torch.Tensor]) -> BlockingCall[None]:
        backend, timeout_secs = self._backend, self._rendezvous.timeout_s
        assert backend is not None

        def broadcast(call: BlockingCall[None]) -> None:
            def on_complete(count: int) -> None:
                call.done = count

            try:
                backend.send(parts, on_complete, timeout_secs)
            except RuntimeError as error:
                raise GroupError(error_summary(error)) from None

        return BlockingCall(f"weights-broadcast-{self._rendezvous.group_name}", broadcast)


class _SendMonitor:
    """Counts sent bytes and detects a stalled message.

    A message shows no progress before all of it was sent.
    """

    def __init__(self, order: ReceiveOrder, stall_secs: float) -> None:
        self.bytes_sent = 0
        self._messages = order.merged_plan.messages
        self._stall_secs = stall_secs
        self._done = 0
        self._changed_at = time.monotonic()

    def update(self, done: int) -> bool:
        """Whether another message was sent since the last call."""
        changed = done > self._done
        if changed:
            sent = self._messages[self._done : done]
            self.bytes_sent += sum(message.nbytes for message in sent)
            self._done, self._changed_at = done, time.monotonic()
        return changed

    def stall_reason(self) -> str | None:
        if self._done == len(self._messages):
            return None
        message = self._messages[self._done]
        limit_secs = self._stall_secs + message.nbytes / MIN_BYTES_PER_SEC
        if time.monotonic() - self._changed_at < limit_secs:
            return None
        return f"{message.what} was not taken within {limit_secs:.0f} s"


def _abort_all(references: list[Any]) -> None:
    for reference in references:
        if hasattr(reference, "abort"):
            reference.abort()
    references.clear()


def _file_messages(order: ReceiveOrder, region: FileRegion) -> list[torch.Tensor]:
    start, end = region_span(region, order.plans)
    mapping = map_file_to_read(region.path, end)
    read_ahead(mapping, start, end)
    return [
        mapping[message.offset : message.offset + message.nbytes]
        for message in order.merged_plan.messages
    ]


def _tensor_messages(
    order: ReceiveOrder, tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    import torch

    parts: list[torch.Tensor] = []
    for plan in order.plans:
        flat = [tensor_bytes(spec, tensors) for spec in plan.tensors]
        parts += flat if len(plan.messages) == len(flat) else [torch.cat(flat)]
    return parts


def tensor_bytes(spec: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor as flat uint8. Raises GroupError if it differs from its announcement."""
    import torch

    tensor = tensors.get(spec.name)
    if tensor is None:
        raise GroupError(f"tensor {spec.name!r} is announced, but is not among those to send")
    if tensor.dtype != getattr(torch, spec.dtype) or tuple(tensor.shape) != spec.shape:
        raise GroupError(
            f"tensor {spec.name!r} is announced as {spec.dtype} {list(spec.shape)}, and is "
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
