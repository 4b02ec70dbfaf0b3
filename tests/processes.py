"""What the kernel tells of processes, ours among them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import trio

PATIENCE_SECS = 90  # a deadline for hung tests, not a claim about speed


def alive(pid: int) -> bool:
    """One that has ended is not, though nobody may have asked how. While one of its threads is still
    ending, its sockets are still open."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    state, threads = fields[0], int(fields[17])
    return state != "Z" or threads > 1


async def until_gone(*pids: int) -> None:
    with trio.fail_after(PATIENCE_SECS):
        while any(map(alive, pids)):  # noqa: ASYNC110  # the kernel rings no bell here
            await trio.sleep(0.02)


def open_sockets() -> int:
    """How many this process holds."""
    kinds = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            kinds.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(kind.startswith("socket:") for kind in kinds)
