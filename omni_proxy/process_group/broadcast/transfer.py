"""A running receive or send: its order, progress and result.

posting -> armed -> done | failed. Invariant: a transfer ends even if no caller waits for it: after
its last byte, or by the peer's death, a stall, a deadline or an abort. The first outcome is final.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from omni_proxy.process_group.broadcast.receive import ProgressCallback, ReceiveResult
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan, merge_plans

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Longest time that an aborted transfer takes to end: a few polls of its monitor, or a child's exit.
ABORT_SECS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a transfer. A message is one broadcast; `bytes_expected` is of all buckets."""

    buckets_done: int = 0
    messages_done: int = 0
    bytes_received: int = 0
    bytes_expected: int = 0


class Received(Protocol):
    """All buckets, complete. `digests`: strict SHA-256 by tensor name, empty if not requested."""

    @property
    def buckets(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def secs(self) -> float: ...
    @property
    def digests(self) -> dict[str, str]: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by name, in announced order, as views if the alignment allows it."""
        ...

    def close(self) -> None:
        """Releases the memory, as soon as the last of its tensors is dropped too."""
        ...


class PendingReceive(Protocol):
    """One armed receive; safe from any thread."""

    def progress(self) -> Progress: ...

    def wait_past(self, buckets: int, secs: float) -> Progress:
        """Waits until more than `buckets` are done, the receive ends, or `secs` have passed."""
        ...

    def fault(self) -> GroupError | None:
        """The error if the receive has failed, otherwise None. Doesn't block."""
        ...

    def wait(self, secs: float) -> Received:
        """Returns all buckets. Raises GroupError if that fails or takes longer than `secs`."""
        ...

    def abort(self, reason: str) -> None:
        """Ends the receive and drops the group; `wait` raises GroupError with `reason`."""
        ...


@dataclass(frozen=True)
class ReceiveOrder:
    """The buckets to transfer, and their memory: `allocate` returns flat memory for all buckets."""

    plans: tuple[TensorPlan, ...]
    digests: bool = False
    starts: tuple[int, ...] | None = None
    allocate: Callable[[TensorPlan], torch.Tensor] | None = None

    @cached_property
    def merged_plan(self) -> TensorPlan:
        return merge_plans(self.plans, self.starts)

    @cached_property
    def nbytes(self) -> int:
        return sum(message.nbytes for message in self.merged_plan.messages)

    @cached_property
    def message_ends(self) -> list[int]:
        """For each bucket, the number of messages up to its end."""
        return list(itertools.accumulate(len(plan.messages) for plan in self.plans))

    def progress_at(self, messages_done: int, bytes_received: int) -> Progress:
        buckets = bisect.bisect_right(self.message_ends, messages_done)
        return Progress(buckets, messages_done, bytes_received, self.nbytes)

    def final_progress(self) -> Progress:
        return self.progress_at(len(self.merged_plan.messages), self.nbytes)


class Transfer(Generic[T]):
    """State of a transfer that runs in a thread of this process or in a child process.

    `stop(reason)` has to make it end soon; its runner then calls `finish` or `fail`.
    """

    def __init__(self, order: ReceiveOrder, stop: Callable[[str], None]) -> None:
        self.order = order
        self._stop = stop
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._progress = order.progress_at(0, 0)
        self._result: T | None = None
        self._fault: GroupError | None = None

    def progress(self) -> Progress:
        return self._progress

    def fault(self) -> GroupError | None:
        # A new object each time: a traceback would keep the frames of the last raiser alive.
        fault = self._fault
        return fault and GroupError(str(fault), group_dropped=fault.group_dropped)

    def wait(self, secs: float) -> T:
        if not self._ended.wait(secs):
            self.abort(f"not complete within {secs:g} s")
        if (fault := self.fault()) is not None:
            raise fault
        assert self._result is not None
        return self._result

    def abort(self, reason: str) -> None:
        if self._ended.is_set():
            return
        self._stop(reason)
        if not self._ended.wait(ABORT_SECS):
            self.fail(GroupError(reason, group_dropped=True))

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait_past(self, buckets: int, secs: float) -> Progress:
        """See `PendingReceive`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._progress.buckets_done > buckets or self._ended.is_set(), secs
            )
        return self._progress

    def report_progress(self, messages_done: int, bytes_received: int) -> None:
        before, self._progress = (
            self._progress,
            self.order.progress_at(messages_done, bytes_received),
        )
        if self._progress.buckets_done > before.buckets_done:
            self._notify()

    def finish(self, result: T) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._progress = self.order.final_progress()
                self._result = result
                self._ended.set()
        self._notify()

    def fail(self, error: GroupError) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._fault = GroupError(str(error), group_dropped=error.group_dropped)
                self._ended.set()
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def start_transfer(
    name: str,
    transfer: Transfer[T],
    run: Callable[[threading.Event, ProgressCallback], T],
    ready_secs: float,
) -> None:
    """Runs a transfer in a separate thread; returns when it is armed.

    `run` sets the event as soon as the peer may send. If it raises GroupError, it is disarmed.
    """
    posted = threading.Event()
    box = [run]  # popped before the call, so that this frame has no reference to the group

    def run_to_end() -> None:
        try:
            transfer.finish(box.pop()(posted, transfer.report_progress))
        except GroupError as error:
            transfer.fail(error)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            transfer.fail(GroupError(f"{type(error).__name__}: {error}", group_dropped=True))
        posted.set()

    threading.Thread(target=run_to_end, name=name, daemon=True).start()
    if not posted.wait(ready_secs):
        transfer.abort(f"not armed within {ready_secs:g} s")
    if (fault := transfer.fault()) is not None:
        raise fault


class LocalReceived:
    """A `Received` in memory of this process."""

    def __init__(self, order: ReceiveOrder, result: ReceiveResult) -> None:
        self.buckets = len(order.plans)
        self.nbytes = order.nbytes
        self.secs = result.secs
        self.digests = result.digests
        self._result: ReceiveResult | None = result

    def tensors(self) -> dict[str, torch.Tensor]:
        if self._result is None:
            raise ValueError("the received memory was already released")
        return self._result.tensors()

    def close(self) -> None:
        self._result = None
