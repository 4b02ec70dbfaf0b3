"""Information from the kernel about processes, including this one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import trio

PATIENCE_SECS = 90  # a deadline for hung tests


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not, unless some of its threads have not ended yet: its
    sockets are still open then."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    state, threads = fields[0], int(fields[17])
    return state != "Z" or threads > 1


async def until_gone(*pids: int) -> None:
    with trio.fail_after(PATIENCE_SECS):
        while any(map(alive, pids)):  # noqa: ASYNC110  # the kernel sends no event here
            await trio.sleep(0.02)


def open_sockets() -> int:
    """The number of sockets that this process has open."""
    kinds = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            kinds.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(kind.startswith("socket:") for kind in kinds)
