"""The trainer's own process group: its store, rank 0, and one broadcast per message.

Built as in real trainers: the store listens before the first init call and does not wait for the
other ranks, and torch's private constructor creates a group that is never the default group
(note:two-phase 1.2).
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

NCCL = "nccl"
POLL_SECS = 0.02


class PendingCall(Protocol):
    """The init call of the other ranks."""

    def refused(self) -> str:
        """The reason of a refusal, "" while the call is open or if it succeeded."""
        ...

    def wait(self) -> str:
        """Wait for its end; the reason of a refusal, or ""."""
        ...


class SyncFailed(Exception):
    """The sync can't continue; the message is the first cause."""


@dataclass(frozen=True, slots=True)
class GroupRendezvous:
    """The rendezvous of the ranks; `world_size` includes the trainer."""

    group_name: str
    world_size: int
    backend: str
    timeout_secs: float
    host: str = "127.0.0.1"


class ListeningGroup(ABC):
    """Rank 0 of a group, whose store listens immediately; `join` waits for all ranks."""

    def __init__(self, host: str, world_size: int, timeout_secs: float) -> None:
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout_secs)
        self._store = TCPStore(host, 0, world_size, True, self._timeout, wait_for_workers=False)
        self.port = int(self._store.port)
        self._group: Any = None

    def join(self, init: PendingCall) -> None:
        """Join while the others' init call is in progress; SyncFailed as soon as it is refused.

        The constructor can't be interrupted: if the others don't join, its thread runs until its
        timeout or the end of the process.
        """
        results: list[Exception | None] = []

        def construct() -> None:
            try:
                self._group = self._construct()
            except (RuntimeError, ValueError) as error:  # also torch's own, which are subclasses
                results.append(error)
            else:
                results.append(None)

        thread = threading.Thread(target=construct, name="join", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_SECS)
            if reason := init.refused():
                raise SyncFailed(reason)
        if (error := results[0]) is not None:
            raise SyncFailed(f"the group could not be created: {first_line(error)}")
        if reason := init.wait():
            raise SyncFailed(reason)

    @abstractmethod
    def _construct(self) -> Any:
        """Create torch's group once all ranks have joined. Raises RuntimeError, ValueError."""


class Group(ListeningGroup):
    """A named group, as in SGLang's trainers."""

    def __init__(self, settings: GroupRendezvous) -> None:
        super().__init__(settings.host, settings.world_size, settings.timeout_secs)
        self.settings = settings

    def broadcast(self, tensor: torch.Tensor, *, wait: bool = True) -> None:
        """From rank 0 to all. Raises SyncFailed."""
        if self.settings.backend == NCCL:
            tensor = tensor.cuda()
        try:
            work = dist.broadcast(tensor.contiguous(), 0, group=self._group, async_op=True)
            if wait and work is not None:
                work.wait()
        except RuntimeError as error:
            raise SyncFailed(f"the broadcast failed: {first_line(error)}") from error

    def leave(self) -> None:
        """Destroy the group, in any state."""
        if self._group is None:
            return
        with suppress(RuntimeError, ValueError):  # it may be broken
            dist.destroy_process_group(self._group)
        self._group = None

    def _construct(self) -> Any:
        settings = self.settings
        options: dict[str, Any] = {}
        if settings.backend == NCCL:
            options["device_id"] = torch.device("cuda", torch.cuda.current_device())
        made, _ = c10d._new_process_group_helper(
            settings.world_size,
            0,
            [],
            c10d.Backend(settings.backend),
            c10d.PrefixStore(settings.group_name, self._store),
            group_name=c10d.GroupName(settings.group_name),
            timeout=self._timeout,
            **options,
        )
        c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(settings.world_size)}
        return made


def first_line(error: Exception) -> str:
    """The first line of the message, without torch's source position and guesses."""
    first, *_ = str(error).splitlines() or [type(error).__name__]
    first, _, _ = first.partition(" This is typically caused by")
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", first)
