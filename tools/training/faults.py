"""Faults of a trainer, for tests: one small class for each, by name in `FAULTS`.

A fault changes what is announced or sent, or ends the trainer. The calls around it are those of a
correct trainer; the other side has to handle the fault.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tools.training.buckets import Bucket
    from tools.training.endpoint import Answer

NONE = "none"


@dataclass(frozen=True, slots=True)
class Moment:
    """The message that is about to be sent, its position, and how to send a part of it."""

    number: int
    count: int
    begin: Callable[[torch.Tensor], None]

    @property
    def midway(self) -> bool:
        return self.number == self.count // 2


class Fault:
    """No fault; subclasses override the steps that they change."""

    what = "nothing goes wrong"
    on_disk = False  # whether a sync without a group can have it

    def master_port(self, port: int) -> int:
        return port

    def announced(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        return buckets

    def before(self) -> None:
        """Called when all ranks are ready and nothing was sent."""

    def sent(self, tensor: torch.Tensor, moment: Moment) -> Iterator[torch.Tensor]:
        """The messages that are broadcast instead of `tensor`."""
        yield tensor

    def after(self) -> None:
        """Called when all tensors were sent and before the completion."""


class DieBefore(Fault):
    what = "dies when all ranks are ready, before it sends a byte"
    on_disk = True

    def before(self) -> None:
        die()


class DieDuring(Fault):
    what = "dies in the middle of the broadcast"

    def sent(self, tensor: torch.Tensor, moment: Moment) -> Iterator[torch.Tensor]:
        if moment.midway:
            moment.begin(tensor)
            die()
        yield tensor


class DieAfter(Fault):
    what = "dies after the broadcast, before it completes the update"

    def after(self) -> None:
        die()


class WrongShape(Fault):
    what = "announces a shape that the model does not have"
    on_disk = True

    def announced(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        first, *others = buckets
        return [first.misshapen(), *others]


class ShortBucket(Fault):
    what = "sends fewer bytes than it announced"

    def sent(self, tensor: torch.Tensor, moment: Moment) -> Iterator[torch.Tensor]:
        yield tensor.reshape(-1)[: tensor.numel() // 2] if moment.midway else tensor


class LongBucket(Fault):
    what = "sends more bytes than it announced"

    def sent(self, tensor: torch.Tensor, moment: Moment) -> Iterator[torch.Tensor]:
        yield torch.cat([tensor.reshape(-1)] * 2) if moment.midway else tensor


class NeverSends(Fault):
    what = "completes the update without a broadcast"

    def sent(self, tensor: torch.Tensor, moment: Moment) -> Iterator[torch.Tensor]:
        yield from ()


class Stops(Fault):
    """Stopped (SIGSTOP) for `secs`; a background shell continues it, so that it ends."""

    what = "stops in the middle of the broadcast, like a machine that hangs"
    secs = 60.0

    def sent(self, tensor: torch.Tensor, moment: Moment) -> Iterator[torch.Tensor]:
        if moment.midway:
            moment.begin(tensor)
            wake = f"sleep {self.secs:g}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        yield tensor


class WrongPort(Fault):
    what = "announces a port that accepts connections and never sends a byte"

    def __init__(self) -> None:
        self._silent: socket.socket | None = None

    def master_port(self, port: int) -> int:
        self._silent = socket.create_server(("127.0.0.1", 0))
        return int(self._silent.getsockname()[1])


class TwoAtOnce(Fault):
    """`second_trainer` is set by the sync: it sends another trainer's init and returns the answer.

    The init should be refused; `answer` is the result.
    """

    what = "a second trainer joins in the middle of the first one's sync"

    def __init__(self) -> None:
        self.second_trainer: Callable[[], Answer] | None = None
        self.answer: Answer | None = None

    def before(self) -> None:
        if self.second_trainer is not None:
            self.answer = self.second_trainer()


FAULTS: dict[str, type[Fault]] = {
    NONE: Fault,
    "die-before": DieBefore,
    "die-during": DieDuring,
    "die-after": DieAfter,
    "wrong-shape": WrongShape,
    "short-bucket": ShortBucket,
    "long-bucket": LongBucket,
    "never-sends": NeverSends,
    "stop": Stops,
    "two-at-once": TwoAtOnce,
    "wrong-port": WrongPort,
}


ON_DISK = tuple(name for name, each in FAULTS.items() if each.on_disk)


def die() -> None:
    """Exit immediately without any cleanup, as if killed for lack of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
