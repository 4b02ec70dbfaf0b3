"""Peak additional memory of a process tree while it receives a version.

Counts anonymous and shared memory, with pages shared by several processes counted once (Pss_Anon
and Pss_Shmem of /proc/PID/smaps_rollup, which the kernel counts page by page). The result is the
maximum of readings a few milliseconds apart, which is shorter than touching a bucket of 64 MiB
takes. The mapped pages of the version's own file are subtracted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

EVERY_SECS = 0.003
KIB = 1024


class Peak:
    """The peak so far (`extra_bytes`), without the version's newly mapped `file_bytes`.

    The pages of a file count as soon as they are mapped, which is before the receiver is ready.
    """

    def __init__(self, pids: Callable[[], Sequence[int]], file_bytes: int) -> None:
        self._pids = pids
        self._file_bytes = file_bytes
        self._anonymous, self._shared = unbacked_bytes(pids())
        self.extra_bytes = 0
        self.readings = 0

    def look(self) -> None:
        anonymous, shared = unbacked_bytes(self._pids())
        beside = max(0, shared - self._shared - self._file_bytes)
        self.extra_bytes = max(self.extra_bytes, anonymous - self._anonymous + beside)
        self.readings += 1


@contextmanager
def watched(pids: Callable[[], Sequence[int]], file_bytes: int) -> Iterator[Peak]:
    """Measure the peak within the block, relative to its start, in a background thread."""
    peak = Peak(pids, file_bytes)
    over = threading.Event()

    def look() -> None:
        while not over.wait(EVERY_SECS):
            peak.look()

    thread = threading.Thread(target=look, name="bench-memory")
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def tree(root: int) -> list[int]:
    """A process and its running descendants."""
    found = [root]
    for pid in found:
        with suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):
                    found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def unbacked_bytes(pids: Sequence[int]) -> tuple[int, int]:
    """Anonymous and shared memory of these processes, counting each page once."""
    anonymous = shared = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    anonymous += int(line.split()[1]) * KIB
                elif line.startswith("Pss_Shmem:"):
                    shared += int(line.split()[1]) * KIB
    return anonymous, shared
