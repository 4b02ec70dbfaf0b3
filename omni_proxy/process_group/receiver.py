"""Being a rank of a trainer's group, in this process or in a child: one interface for both.

All calls block and are safe from any thread; none needs torch in this process where `isolation` is
"process", but for `Received.tensors`. What fails ends disarmed: with no thread, child or memory
left that waits for the peer. An idle receiver costs nothing but its memory.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from omni_proxy.process_group.cancel_token import CancelToken
from omni_proxy.process_group.group import GroupLimits
from omni_proxy.process_group.mapped_file import FileRegion
from omni_proxy.process_group.rendezvous import Meeting, Rendezvous
from omni_proxy.process_group.sender import Sender
from omni_proxy.process_group.subprocess_receiver import ProcessReceiver
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan
from omni_proxy.process_group.thread_receiver import ThreadReceiver
from omni_proxy.process_group.transfer import PendingReceive, Progress, Received

__all__ = [
    "CancelToken",
    "FileRegion",
    "GroupError",
    "GroupLimits",
    "Isolation",
    "Meeting",
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
    """All groups of one rank. Whoever opens it closes it."""

    def warm(self) -> None:
        """Has ready what the first `init` would wait for (an import of torch); returns at once."""
        ...

    def init(self, rendezvous: Rendezvous, stop: CancelToken | None = None) -> None:
        """Joins a trainer's group; returns once all ranks are there. Raises GroupError.

        A group of this name whose trainer lives is left as it is, one whose trainer has gone is
        replaced. `stop` ends it early, with its reason; afterwards it is `destroy` that does.
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
        """Returns once there is memory for all buckets and the first receive is posted.

        Raises GroupError: then nothing is armed. With `into` the bytes land in that file.
        """
        ...

    def destroy(self, group_name: str) -> None:
        """Ends a group, whatever it is doing; raises GroupError where there is none."""
        ...

    def sender(self, meeting: Meeting) -> Sender:
        """Opens a group of our own, in which we are rank 0 (the other direction)."""
        ...

    def busy(self) -> bool:
        """Whether it is in any group, or has a child at work."""
        ...

    def status(self) -> dict[str, Any]:
        """JSON-ready: `groups` with what they do, `kept_bytes`, `processes` where there are any."""
        ...

    def close(self) -> None:
        """Ends everything for good; blocked calls elsewhere raise GroupError at once."""
        ...


def open_receiver(isolation: Isolation, limits: GroupLimits, *, name: str) -> Receiver:
    """`name` is shown in threads and logs. Raises GroupError where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise GroupError(
            f"joining a trainer's group needs torch, which is not {_where()}: "
            "pip install 'omni-proxy[weights]'"
        )
    if isolation == "process":
        return ProcessReceiver(limits, name)
    return ThreadReceiver(limits)


def _where() -> str:
    if getattr(sys, "frozen", False):
        return "in this one-file program; use the one that pip installs"
    return "installed here"
