"""The trainer's own process group: its store, rank 0, and one broadcast per message.

Made as trainers make it: the store listens before anybody is asked to come and waits for nobody,
and torch's private constructor builds a group that is never the default one (two-phase.md 1.2).
"""

from __future__ import annotations

import re
import threading
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


class Called(Protocol):
    """The call that asks the others to come, as far as it is known."""

    def refused(self) -> str:
        """Why they will not come, "" while it is open or where they do."""
        ...

    def wait(self) -> str:
        """Waits for its end; the same."""
        ...


class SyncFailed(Exception):
    """The sync can't go on; the text is the first cause."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks meet; `world_size` counts the trainer."""

    group_name: str
    world_size: int
    backend: str
    timeout_secs: float
    host: str = "127.0.0.1"


class Group:
    """Listens at once; `join` returns when every rank has come."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._patience = timedelta(seconds=meeting.timeout_secs)
        self._store = TCPStore(
            meeting.host, 0, meeting.world_size, True, self._patience, wait_for_workers=False
        )
        self.port = int(self._store.port)
        self._made: Any = None

    def join(self, init: Called) -> None:
        """Meets the others while their init call is open; SyncFailed as soon as that refuses.

        The constructor can't be interrupted: where it waits in vain, its thread is left to its
        timeout and ends with the process.
        """
        came: list[Exception | None] = []

        def meet() -> None:
            try:
                self._made = self._construct()
            except (RuntimeError, ValueError) as error:  # torch's own are among them
                came.append(error)
            else:
                came.append(None)

        meeting = threading.Thread(target=meet, name="join", daemon=True)
        meeting.start()
        while meeting.is_alive():
            meeting.join(POLL_SECS)
            if why := init.refused():
                raise SyncFailed(why)
        if came[0] is not None:
            raise SyncFailed(f"the group did not form: {_first_line(came[0])}")
        if why := init.wait():
            raise SyncFailed(why)

    def broadcast(self, tensor: torch.Tensor, *, wait: bool = True) -> None:
        """From rank 0 to all; SyncFailed where torch says that it failed."""
        if self.meeting.backend == NCCL:
            tensor = tensor.cuda()
        try:
            work = dist.broadcast(tensor.contiguous(), 0, group=self._made, async_op=True)
            if wait and work is not None:
                work.wait()
        except RuntimeError as error:
            raise SyncFailed(f"the broadcast failed: {_first_line(error)}") from error

    def leave(self) -> None:
        """Forgets the group, whatever state it is in."""
        if self._made is None:
            return
        with suppress(RuntimeError, ValueError):  # it may be broken: that is known by now
            dist.destroy_process_group(self._made)
        self._made = None

    def _construct(self) -> Any:
        meeting = self.meeting
        options: dict[str, Any] = {}
        if meeting.backend == NCCL:
            options["device_id"] = torch.device("cuda", torch.cuda.current_device())
        made, _ = c10d._new_process_group_helper(
            meeting.world_size,
            0,
            [],
            c10d.Backend(meeting.backend),
            c10d.PrefixStore(meeting.group_name, self._store),
            group_name=c10d.GroupName(meeting.group_name),
            timeout=self._patience,
            **options,
        )
        c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(meeting.world_size)}
        return made


def _first_line(error: Exception) -> str:
    """Without torch's place in its own source, and without its guesses."""
    first, *_ = str(error).splitlines() or [type(error).__name__]
    first, _, _ = first.partition(" This is typically caused by")
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", first)
