"""The receiver whose blocking threads live in this process.

For hosts where a child costs too much, and inside the child itself. A peer that sends more than it
announced ends this process, and one that stops keeps a thread until the group's timeout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from omni_proxy.process_group.cancel_token import CancelToken
from omni_proxy.process_group.group import GroupLimits, Groups
from omni_proxy.process_group.mapped_file import (
    STEP_BYTES,
    FileRegion,
    in_memory,
    map_ahead,
    mapped,
    opened,
    span,
    touch,
)
from omni_proxy.process_group.rendezvous import Meeting, Rendezvous
from omni_proxy.process_group.tensor_plan import TensorPlan
from omni_proxy.process_group.thread_sender import LocalSender
from omni_proxy.process_group.transfer import LocalReceived, ReceiveOrder, Transfer

if TYPE_CHECKING:
    import torch


class ThreadReceiver:
    """See `Receiver`."""

    def __init__(self, limits: GroupLimits) -> None:
        self._limits = limits
        self._groups = Groups(limits)

    def warm(self) -> None:
        """Nothing to do: a process that holds a model has torch in it."""

    def init(self, rendezvous: Rendezvous, stop: CancelToken | None = None) -> None:
        self._groups.init(rendezvous, stop)

    def arm(
        self,
        group_name: str,
        plans: Sequence[TensorPlan],
        *,
        ready_secs: float,
        into: FileRegion | None = None,
        digests: bool = False,
    ) -> Transfer[LocalReceived]:
        order = ReceiveOrder(tuple(plans), digests)
        if into is not None:
            span(into, plans)
            order = ReceiveOrder(tuple(plans), digests, into.starts, file_block(into, plans))
        return self._groups.arm(group_name, order, ready_secs=ready_secs)

    def destroy(self, group_name: str) -> None:
        self._groups.destroy(group_name)

    def sender(self, meeting: Meeting) -> LocalSender:
        return LocalSender(meeting, self._limits.stall_secs)

    def busy(self) -> bool:
        return bool(self._groups.status()["groups"])

    def status(self) -> dict[str, Any]:
        return {"isolation": "thread", **self._groups.status()}

    def close(self) -> None:
        self._groups.close()


def file_block(
    place: FileRegion, plans: Sequence[TensorPlan]
) -> Callable[[TensorPlan], torch.Tensor]:
    """Maps the place when it is asked for; raises GroupError where that cannot be."""

    def block(_: TensorPlan) -> torch.Tensor:
        descriptor = opened(place, plans)
        try:
            file = os.fstat(descriptor)
            whole = mapped(descriptor, file.st_size)
        finally:
            os.close(descriptor)
        if in_memory(file.st_dev):
            map_ahead(whole, *span(place, plans))
        else:
            touch(whole, *span(place, plans), at_once=STEP_BYTES)
        return whole

    return block
