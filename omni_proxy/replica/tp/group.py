"""The ranks' process group: sum and gather over gloo, on loopback only; messages between the ranks.

Invariant: the group has its own store and is not the default group, so trainers' groups can exist
in the same process. A wait ends at most WATCH_SECS after the end of a peer. Messages for tensor
parallelism are `Admin` messages with actions that no route has, so a follower's inbox has only
ordinary stage messages.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from msgspec import Struct
from torch import Tensor
from torch._C._distributed_c10d import GatherOptions, PrefixStore, ProcessGroupGloo, TCPStore

from omni_proxy.replica.pipeline.stage_messages import Admin, StageOutput

LOOPBACK = "127.0.0.1"
STEP_SECS = 60.0  # for one collective operation, if a peer runs but does not answer
RENDEZVOUS_SECS = 60.0  # for all ranks to connect to the store
WATCH_SECS = 0.5
CLOSE_SECS = 2.0
ALIGNMENT = 16  # of gathered tensors, in bytes: a multiple of each dtype's size


class RankLost(Exception):
    """A rank has ended or is out of step, so the others cannot compute any more."""


def never_lost() -> str:
    """The `lost` of a rank whose process ends with its peer, so there is nothing to check."""
    return ""


def open_store(size: int) -> tuple[Any, int]:
    """The store for the rendezvous, and its port, bound to loopback only."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        store = _store(port, size, master_listen_fd=listener.detach(), is_master=True)
    return store, port


def join_store(port: int, size: int) -> Any:
    return _store(port, size, is_master=False)


def _store(port: int, size: int, **how: Any) -> Any:
    timeout = timedelta(seconds=RENDEZVOUS_SECS)
    return TCPStore(LOOPBACK, port, size, timeout=timeout, wait_for_workers=False, **how)


class RankGroup:
    """All methods except `close` are collective: each rank calls them in the same order.

    One thread at a time may use it. `lost` returns the reason why a peer is lost, or "". `broken`
    is the reason of the first failure; once it is set, no operation succeeds.
    """

    def __init__(self, rank: int, size: int, lost: Callable[[], str] = never_lost) -> None:
        self.rank, self.size = rank, size
        self._lost = lost
        self.broken = ""
        self._group: Any = None

    def join(self, store: Any) -> None:
        """Wait for all ranks; raises RankLost if one does not connect."""
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
        options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=STEP_SECS)
        prefixed = PrefixStore("tp/", store)
        try:
            self._group = ProcessGroupGloo(prefixed, self.rank, self.size, options)
        except RuntimeError as error:
            raise RankLost(f"the {self.size} ranks did not connect: {error}") from error

    def add_up(self, tensor: Tensor) -> Tensor:
        """Make `tensor` the sum of all ranks' tensors, in place; raises RankLost."""
        self._finish(lambda: self._group.allreduce([tensor]))
        return tensor

    def gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """For each of the tensors, all ranks' in the order of the ranks; an empty list at ranks
        above 0.

        The ranks' tensors must have the same shapes and dtypes. Several are copied, so that one
        operation sends them all. Raises RankLost.
        """
        parts = [_flat_bytes(tensor) for tensor in tensors]
        starts = [0, *accumulate(-(-part.numel() // ALIGNMENT) * ALIGNMENT for part in parts)]
        spans = [
            slice(start, start + part.numel()) for start, part in zip(starts, parts, strict=False)
        ]
        if len(parts) == 1:
            (sent,) = parts
        else:
            sent = torch.empty(starts[-1], dtype=torch.uint8)
            for span, part in zip(spans, parts, strict=True):
                sent[span] = part
        is_root = self.rank == 0
        received = [torch.empty_like(sent) for _ in range(self.size)] if is_root else []
        options = GatherOptions()
        options.rootRank = 0
        self._finish(lambda: self._group.gather([received] if is_root else [], [sent], options))
        if not is_root:
            return []
        return [
            [data[span].view(tensor.dtype).view(tensor.shape) for data in received]
            for span, tensor in zip(spans, tensors, strict=True)
        ]

    def _finish(self, begin: Callable[[], Any]) -> None:
        if self._group is None:
            raise RankLost("the ranks have not connected, or have left the group")
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
                # torch raises the same error for a timeout of the wait and for a failed operation.
                over = time.monotonic() >= until
                if over or self._lost() or "timed out" not in str(error).lower():
                    raise self._fault(error) from error

    def _fault(self, error: RuntimeError) -> RankLost:
        self.broken = self._lost() or f"rank {self.rank} received no data from the others: {error}"
        return RankLost(self.broken)

    def close(self) -> None:
        """Leaves the group; waits up to CLOSE_SECS for a collective operation that still runs."""
        groups = [self._group]
        self._group = None
        # Its destructor waits for running operations, and would abort a process that is exiting.
        closing = threading.Thread(target=groups.clear, name="tp-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECS)


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


STEP = "tp_step"
VERDICT = "tp_verdict"
ABORT_STEP = "tp_abort_step"


class Vote(Struct, frozen=True, tag="vote"):
    """A follower has finished the slow step `number` of an operation; `fault` "" means success.

    If `damaged`, the step left a mix of old and new weights.
    """

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
    """The next batch: journal entries first, then each KV's number with its new tokens."""
    return Admin("", STEP, {"kv": entries, "parts": parts})


def verdict(op_id: str, number: int, fault: str) -> Admin:
    """The result of the slow step `number` at all ranks; "" lets the operation continue."""
    return Admin(op_id, VERDICT, {"number": number, "fault": fault})


def abort_step(op_id: str, number: int, fault: str) -> Admin:
    """Aborts the slow step `number` at ranks that are still in it, because another rank failed."""
    return Admin(op_id, ABORT_STEP, {"number": number, "fault": fault})
