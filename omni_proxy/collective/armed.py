"""What may be asked of a receive that is under way, and what it brings. Pure but for the memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from omni_proxy.collective.receive import Come
from omni_proxy.collective.specs import GroupError, Plan, merged

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


class Armed(Protocol):
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
class Order:
    """What to receive, and where to: `block` gives flat memory for the plan of all buckets."""

    plans: tuple[Plan, ...]
    digests: bool = False
    starts: tuple[int, ...] | None = None
    block: Callable[[Plan], torch.Tensor] | None = None

    @cached_property
    def whole(self) -> Plan:
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

    def __init__(self, order: Order, come: Come) -> None:
        self.buckets = len(order.plans)
        self.nbytes = order.nbytes
        self.secs = come.secs
        self.digests = come.digests
        self._come: Come | None = come

    def tensors(self) -> dict[str, torch.Tensor]:
        if self._come is None:
            raise ValueError("this memory was given back already")
        return self._come.tensors()

    def close(self) -> None:
        self._come = None
