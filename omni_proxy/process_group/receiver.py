"""The receiver, a rank of a trainer's group: one interface for this process and child processes.

All calls block and are safe from any thread. With `isolation` "process", this process needs torch
only for `Received.tensors`. Invariant: a failed receive is disarmed, and leaves no thread, child or
memory that waits for the peer. An idle receiver costs only its memory.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from omni_proxy.process_group.blocking_call import CancelToken
from omni_proxy.process_group.broadcast.mapped_file import (
    FileRegion,
    map_for_receive,
    region_span,
)
from omni_proxy.process_group.broadcast.transfer import (
    LocalReceived,
    PendingReceive,
    Progress,
    Received,
    ReceiveOrder,
    Transfer,
)
from omni_proxy.process_group.fork.subprocess_receiver import SubprocessReceiver
from omni_proxy.process_group.rank_protocol import GroupLimits, Groups
from omni_proxy.process_group.rendezvous import HostedRendezvous, Rendezvous
from omni_proxy.process_group.sender import Sender, ThreadSender
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan

__all__ = [
    "CancelToken",
    "FileRegion",
    "GroupError",
    "GroupLimits",
    "HostedRendezvous",
    "Isolation",
    "PendingReceive",
    "Progress",
    "Received",
    "Receiver",
    "Rendezvous",
    "Sender",
    "TensorPlan",
    "open_receiver",
]

Isolation = Literal["process", "thread"]


class Receiver(Protocol):
    """All groups of one rank. The caller that opens a receiver has to close it."""

    def warm(self) -> None:
        """Starts the import of torch, for which the first `init` would wait; doesn't block."""
        ...

    def init(self, rendezvous: Rendezvous, stop: CancelToken | None = None) -> None:
        """Joins a trainer's group; returns when all ranks have joined. Raises GroupError.

        A group of the same name is replaced if its trainer has disconnected; if the trainer is
        alive, GroupError is raised. `stop` cancels the call; after it `destroy` ends the group.
        """
        ...

    def arm(
        self,
        group_name: str,
        plans: Sequence[TensorPlan],
        *,
        ready_secs: float,
        into: FileRegion | None = None,
        digests: bool = False,
    ) -> PendingReceive:
        """Returns when memory for all buckets is allocated and the first receive is posted.

        If it raises GroupError, nothing is armed. With `into` the bytes are written to that file.
        """
        ...

    def destroy(self, group_name: str) -> None:
        """Ends a group in any state; raises GroupError if there is none."""
        ...

    def sender(self, rendezvous: HostedRendezvous) -> Sender:
        """Opens a group in which this process is rank 0, to send."""
        ...

    def busy(self) -> bool:
        """Whether the receiver is in a group, or has a running child."""
        ...

    def status(self) -> dict[str, Any]:
        """JSON-ready: `groups` and their progress, `kept_bytes`, `processes` if there are any."""
        ...

    def close(self) -> None:
        """Ends all groups permanently; blocked calls in other threads raise GroupError."""
        ...


def open_receiver(isolation: Isolation, limits: GroupLimits, *, name: str) -> Receiver:
    """Opens a receiver; `name` is in thread names and logs. Raises GroupError without torch."""
    if importlib.util.find_spec("torch") is None:
        raise GroupError(
            f"joining a trainer's group needs torch, which is not {_torch_location()}: "
            "pip install 'omni-proxy[weights]'"
        )
    if isolation == "process":
        return SubprocessReceiver(limits, name)
    return ThreadReceiver(limits)


def _torch_location() -> str:
    if getattr(sys, "frozen", False):
        return "in this one-file program; use the one that pip installs"
    return "installed here"


class ThreadReceiver:
    """A `Receiver` whose blocking threads run in this process.

    For hosts on which a child process costs too much. A peer that sends more than it announced
    aborts this process, and a peer that stops sending blocks a thread until the group's timeout.
    """

    def __init__(self, limits: GroupLimits) -> None:
        self._limits = limits
        self._groups = Groups(limits)

    def warm(self) -> None:
        """Does nothing: a process with a model has already imported torch."""

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
            region_span(into, plans)
            allocate = map_for_receive(into, plans)
            order = ReceiveOrder(tuple(plans), digests, into.starts, allocate)
        return self._groups.arm(group_name, order, ready_secs=ready_secs)

    def destroy(self, group_name: str) -> None:
        self._groups.destroy(group_name)

    def sender(self, rendezvous: HostedRendezvous) -> ThreadSender:
        return ThreadSender(rendezvous, self._limits.stall_secs)

    def busy(self) -> bool:
        return bool(self._groups.status()["groups"])

    def status(self) -> dict[str, Any]:
        return {"isolation": "thread", **self._groups.status()}

    def close(self) -> None:
        self._groups.close()
