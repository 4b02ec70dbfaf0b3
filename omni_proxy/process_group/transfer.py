"""A transfer under way: in a thread of this process, or in a child that tells of it.

posting -> armed -> done | failed. Invariant: it ends by itself, also if nobody ever asks: by its
last byte, its peer's death, a standstill, a deadline or an abort. The first word is the last one.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from omni_proxy.process_group.receive import Moved, ReceiveResult
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan, merged

T = TypeVar("T")

# How long an aborted transfer may take to notice: a few ticks of its watch, or a child's death.
ENDING_SECS: Final = 5.0


class Transfer(Generic[T]):
    """`stop(why)` has to make the transfer end soon, and somebody then call `finish` or `fail`."""

    def __init__(self, order: ReceiveOrder, stop: Callable[[str], None]) -> None:
        self.order = order
        self._stop = stop
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._grown = threading.Condition()
        self._progress = order.progress(0, 0)
        self._result: T | None = None
        self._fault: GroupError | None = None

    def progress(self) -> Progress:
        return self._progress

    def fault(self) -> GroupError | None:
        # Each time a new one: a traceback would keep the frames of whoever raised it last.
        known = self._fault
        return known and GroupError(str(known), group_dropped=known.group_dropped)

    def wait(self, secs: float) -> T:
        if not self._ended.wait(secs):
            self.abort(f"not complete within {secs:g} s")
        if (fault := self.fault()) is not None:
            raise fault
        assert self._result is not None
        return self._result

    def abort(self, why: str) -> None:
        if self._ended.is_set():
            return
        self._stop(why)
        if not self._ended.wait(ENDING_SECS):
            self.fail(GroupError(why, group_dropped=True))

    def ended(self, within_secs: float) -> bool:
        return self._ended.wait(within_secs)

    def moved_past(self, buckets: int, secs: float) -> Progress:
        """How far it is once more than `buckets` are done, or it has ended, or `secs` are over."""
        with self._grown:
            self._grown.wait_for(
                lambda: self._progress.buckets_done > buckets or self._ended.is_set(), secs
            )
        return self._progress

    def moved(self, messages_done: int, bytes_come: int) -> None:
        before, self._progress = self._progress, self.order.progress(messages_done, bytes_come)
        if self._progress.buckets_done > before.buckets_done:
            self._tell()

    def finish(self, result: T) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._progress = self.order.progress(*self.order.all)
                self._result = result
                self._ended.set()
        self._tell()

    def fail(self, error: GroupError) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._fault = GroupError(str(error), group_dropped=error.group_dropped)
                self._ended.set()
        self._tell()

    def _tell(self) -> None:
        with self._grown:
            self._grown.notify_all()


def run_underway(
    name: str,
    underway: Transfer[T],
    transfer: Callable[[threading.Event, Moved], T],
    ready_secs: float,
) -> None:
    """Starts a transfer in a watching thread; returns once it is armed.

    `transfer` sets the event as soon as the peer may send. Raises GroupError: it is disarmed then.
    """
    posted = threading.Event()
    box = [transfer]

    def run() -> None:
        try:
            underway.finish(box.pop()(posted, underway.moved))
        except GroupError as error:
            underway.fail(error)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            underway.fail(GroupError(f"{type(error).__name__}: {error}", group_dropped=True))
        posted.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    if not posted.wait(ready_secs):
        underway.abort(f"not armed within {ready_secs:g} s")
    if (fault := underway.fault()) is not None:
        raise fault


# What may be asked of a receive that is under way, and what it brings. Pure but for the memory.

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a receive has come; messages are broadcasts, `bytes_expected` is all buckets'."""

    buckets_done: int = 0
    messages_done: int = 0
    bytes_come: int = 0
    bytes_expected: int = 0


class Received(Protocol):
    """All buckets, whole. `digests`: strict SHA-256 by tensor name, empty where not asked for."""

    @property
    def buckets(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def secs(self) -> float: ...
    @property
    def digests(self) -> dict[str, str]: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, in announced order, without a copy wherever the place allows a view."""
        ...

    def close(self) -> None:
        """Gives the memory back once the last of these tensors is dropped too."""
        ...


class PendingReceive(Protocol):
    """One armed receive; safe from any thread."""

    def progress(self) -> Progress: ...

    def moved_past(self, buckets: int, secs: float) -> Progress:
        """How far it is once more than `buckets` are done, or it has ended, or `secs` are over."""
        ...

    def fault(self) -> GroupError | None:
        """Why it has failed, if it has; returns at once."""
        ...

    def wait(self, secs: float) -> Received:
        """All buckets; raises GroupError when it fails, or has not ended within `secs`."""
        ...

    def abort(self, why: str) -> None:
        """Disarms: the group is gone, whoever waits gets GroupError(why)."""
        ...


@dataclass(frozen=True)
class ReceiveOrder:
    """What to receive, and where to: `block` gives flat memory for the plan of all buckets."""

    plans: tuple[TensorPlan, ...]
    digests: bool = False
    starts: tuple[int, ...] | None = None
    block: Callable[[TensorPlan], torch.Tensor] | None = None

    @cached_property
    def whole(self) -> TensorPlan:
        return merged(self.plans, self.starts)

    @cached_property
    def nbytes(self) -> int:
        return sum(message.nbytes for message in self.whole.messages)

    @cached_property
    def all(self) -> tuple[int, int]:
        """How many messages and bytes there are."""
        return len(self.whole.messages), self.nbytes

    @cached_property
    def message_ends(self) -> list[int]:
        """How many messages there are up to the end of each bucket."""
        return list(itertools.accumulate(len(plan.messages) for plan in self.plans))

    def progress(self, messages_done: int, bytes_come: int) -> Progress:
        buckets = bisect.bisect_right(self.message_ends, messages_done)
        return Progress(buckets, messages_done, bytes_come, self.nbytes)


class LocalReceived:
    """What came, in memory of this process."""

    def __init__(self, order: ReceiveOrder, come: ReceiveResult) -> None:
        self.buckets = len(order.plans)
        self.nbytes = order.nbytes
        self.secs = come.secs
        self.digests = come.digests
        self._come: ReceiveResult | None = come

    def tensors(self) -> dict[str, torch.Tensor]:
        if self._come is None:
            raise ValueError("this memory was given back already")
        return self._come.tensors()

    def close(self) -> None:
        self._come = None
