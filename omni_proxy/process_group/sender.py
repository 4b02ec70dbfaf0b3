"""Being rank 0 of a group of our own: its store, its meeting, broadcasts of memory or a file.

All calls block and are safe from any thread. A peer that stops or dies ends the send with a
GroupError and the sender with it: whoever sends again opens a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from omni_proxy.process_group.mapped_file import FileRegion
from omni_proxy.process_group.rendezvous import Meeting
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan
from omni_proxy.process_group.transfer import Progress

if TYPE_CHECKING:
    import torch

__all__ = ["FileRegion", "Meeting", "Sender", "Sending", "Sent"]


@dataclass(frozen=True, slots=True)
class Sent:
    """All of it has left; whether it was taken well, the receivers say."""

    nbytes: int
    secs: float


class Sending(Protocol):
    """One broadcast of some buckets under way; safe from any thread."""

    def progress(self) -> Progress: ...

    def fault(self) -> GroupError | None:
        """Why it has failed, if it has; returns at once."""
        ...

    def wait(self, secs: float) -> Sent:
        """Raises GroupError when it fails, or has not ended within `secs`; the group is gone."""
        ...

    def abort(self, why: str) -> None: ...


class Sender(Protocol):
    """Whoever opens it closes it."""

    @property
    def port(self) -> int:
        """Of the store: what the other ranks are told as master_port."""
        ...

    def meet(self) -> None:
        """Returns once all ranks are there; raises GroupError, within the meeting's timeout."""
        ...

    def send(
        self, plans: Sequence[TensorPlan], source: FileRegion | Mapping[str, torch.Tensor]
    ) -> Sending:
        """Starts to broadcast what these plans announce, in their order and form.

        Out of tensors by name, or of a file with bucket i's block at byte `starts[i]`.

        A source that lacks a tensor, or has it in another size, is a GroupError before any byte.
        """
        ...

    def close(self) -> None:
        """Ends the group and its store, whatever it is doing."""
        ...
