"""The ranks' collective operations: sums and gatherings over gloo, on loopback alone.

Invariant: the group is built directly over a store of its own and touches no default group, so that
trainers' groups live beside it. No wait outlasts a peer's known death by more than WATCH_SECS.

Messages between the leader and its followers, in addition to those of every stage.

A follower receives only ordinary stage messages: those for tensor parallelism are `Admin` messages
with actions that no route has.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from msgspec import Struct
from torch import Tensor
from torch._C._distributed_c10d import GatherOptions, PrefixStore, ProcessGroupGloo, TCPStore

from omni_proxy.replica.pipeline.messages import Admin, StageOutput

LOOPBACK = "127.0.0.1"
STEP_SECS = 60.0  # of one collective operation, for a peer that lives but does not answer
MEET_SECS = 60.0  # for all to have come to the store
WATCH_SECS = 0.5
PART_SECS = 2.0


class RankLost(Exception):
    """A rank is gone or out of step: the others can compute nothing any more."""


def never_lost() -> str:
    """Where the end of the peer ends this process, nothing need be asked."""
    return ""


def open_store(size: int) -> tuple[Any, int]:
    """The store where the ranks meet, and its port: bound to loopback, not to every address."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        store = _store(port, size, master_listen_fd=listener.detach(), is_master=True)
    return store, port


def join_store(port: int, size: int) -> Any:
    return _store(port, size, is_master=False)


def _store(port: int, size: int, **how: Any) -> Any:
    timeout = timedelta(seconds=MEET_SECS)
    return TCPStore(LOOPBACK, port, size, timeout=timeout, wait_for_workers=False, **how)


class RankGroup:
    """All methods but `close` are collective: each rank calls them in the same order.

    One thread at a time may use it. `lost` tells why a peer is known to be gone, or "". Once
    `broken` says why an operation failed, none will succeed.
    """

    def __init__(self, rank: int, size: int, lost: Callable[[], str] = never_lost) -> None:
        self.rank, self.size = rank, size
        self._lost = lost
        self.broken = ""
        self._group: Any = None

    def meet(self, store: Any) -> None:
        """Wait for all ranks; raises RankLost where one does not come."""
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
        options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=STEP_SECS)
        prefixed = PrefixStore("tp/", store)
        try:
            self._group = ProcessGroupGloo(prefixed, self.rank, self.size, options)
        except RuntimeError as error:
            raise RankLost(f"the {self.size} ranks did not meet: {error}") from error

    def add_up(self, tensor: Tensor) -> Tensor:
        """Make `tensor` the sum of all ranks' tensors, in place; raises RankLost."""
        self._finish(lambda: self._group.allreduce([tensor]))
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """At rank 0 all ranks' tensors in their order, elsewhere none; raises RankLost.

        They must be of one shape and type, which may be any.
        """
        sent = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        here = self.rank == 0
        received = [torch.empty_like(sent) for _ in range(self.size)] if here else []
        options = GatherOptions()
        options.rootRank = 0
        self._finish(lambda: self._group.gather([received] if here else [], [sent], options))
        return [each.view(tensor.dtype).view(tensor.shape) for each in received]

    def _finish(self, begin: Callable[[], Any]) -> None:
        if self._group is None:
            raise RankLost("the ranks have not met, or have parted")
        try:
            work = begin()
        except RuntimeError as error:
            raise self._fault(error) from error
        until = time.monotonic() + STEP_SECS
        while True:
            try:
                work.wait(timedelta(seconds=WATCH_SECS))
                return
            except RuntimeError as error:
                # A wait that is over is told like an operation that failed.
                over = time.monotonic() >= until
                if over or self._lost() or "timed out" not in str(error).lower():
                    raise self._fault(error) from error

    def _fault(self, error: RuntimeError) -> RankLost:
        self.broken = self._lost() or f"rank {self.rank} got nothing from the others: {error}"
        return RankLost(self.broken)

    def close(self) -> None:
        """Leaves the group; a collective operation that still runs delays this by PART_SECS."""
        held = [self._group]
        self._group = None
        # Its destructor waits for what is in flight, and would end a process that ends meanwhile.
        parting = threading.Thread(target=held.clear, name="tp-part", daemon=True)
        parting.start()
        parting.join(PART_SECS)


STEP = "tp_step"
VERDICT = "tp_verdict"
GIVE_UP = "tp_give_up"


class Vote(Struct, frozen=True, tag="vote"):
    """A follower has done the slow step `number` of an operation; `fault` "" means success.

    `damaged`: the step left a mix of old and new weights."""

    op_id: str
    number: int
    fault: str
    damaged: bool = False


FollowerMessage: TypeAlias = StageOutput | Vote


class RankMessage(Struct, frozen=True):
    """A follower's message, in the leader's inbox."""

    rank: int
    message: FollowerMessage


class StepOverdue(Struct, frozen=True):
    """The followers' part of an operation has exceeded its deadline."""

    op_id: str
    number: int


def step(entries: list[Any], parts: list[tuple[int, list[int]]]) -> Admin:
    """The next batch: journal entries first, then (KV number, its new tokens)."""
    return Admin("", STEP, {"kv": entries, "parts": parts})


def verdict(op_id: str, number: int, fault: str) -> Admin:
    """The result of the slow step `number` at all ranks; "" lets the operation continue."""
    return Admin(op_id, VERDICT, {"number": number, "fault": fault})


def give_up(op_id: str, number: int, fault: str) -> Admin:
    """Aborts the slow step `number` at ranks still in it, because another rank has failed."""
    return Admin(op_id, GIVE_UP, {"number": number, "fault": fault})
