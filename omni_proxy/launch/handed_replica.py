"""Replicas that are handed over in an upgrade: the record, and a process that is not our child.

Invariant: a process is identified by its pidfd, which its parent opened, so a reused process id is
never confused with it. Its exit status is unknown, because only its parent can read it.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import trio
from msgspec import Struct

UNKNOWN_STATUS: Final = 1  # of a process that has ended


class ReplicaRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A running replica. `entry`: the [[launch]] table from which it was started."""

    name: str
    index: int
    pid: int
    ready: bool = False
    restarts: int = 0
    last_error: str | None = None
    gpus: tuple[str, ...] = ()
    entry: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class HandedReplica:
    """A record with the descriptors of the process and of its output, which the owner closes."""

    record: ReplicaRecord
    pidfd: int
    output: int

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.output)

    async def end(self, term_secs: float, kill_secs: float) -> None:
        """End its group without reading its output, and close the descriptors. Can't be
        cancelled."""
        with trio.CancelScope(shield=True):
            for number, secs in (signal.SIGTERM, term_secs), (signal.SIGKILL, kill_secs):
                with suppress(ProcessLookupError):
                    os.killpg(self.record.pid, number)
                with trio.move_on_after(secs):
                    await trio.lowlevel.wait_readable(self.pidfd)
        self.close()


class HandedProcess:
    """The part of trio.Process that `ChildProcess` uses. Takes over the descriptors; if it raises
    OSError they still belong to the caller."""

    def __init__(self, handed: HandedReplica) -> None:
        self.pid = handed.record.pid
        self._pidfd = handed.pidfd
        self._lock = trio.Lock()
        # Opened again: the flags of a passed descriptor are shared with the other program, which
        # would make it blocking again when it ends.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        self.stdout = trio.lowlevel.FdStream(os.open(f"/proc/self/fd/{handed.output}", flags))
        os.close(handed.output)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return UNKNOWN_STATUS if ended.poll(0) else None

    async def wait(self) -> int:
        async with self._lock:
            await trio.lowlevel.wait_readable(self._pidfd)
        return UNKNOWN_STATUS

    def dup_pidfd(self) -> int:
        return os.dup(self._pidfd)

    def close(self) -> None:
        os.close(self._pidfd)
