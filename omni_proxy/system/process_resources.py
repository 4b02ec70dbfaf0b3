"""Resources of this process: the limit of file descriptors, memory (also whether a file system is
in it), and Python's garbage collector.

Invariants: an error caused by the proxy's own lack of descriptors or memory does not count against
a worker; some descriptors are reserved, so that clients don't get them. A collection of garbage
never blocks the event loop for long: its time grows with the number of objects that it examines and
frees, so objects created at the start are never examined again. Free memory is read from files of
Linux; blocking, but they answer at once.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
from pathlib import Path
from typing import Final

EXHAUSTION_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MAX_FDS: Final = 1 << 20  # a higher limit only makes programs slow that close every descriptor
MAX_RESERVE: Final = 64


def raise_fd_limit() -> None:
    """Raise the soft limit to the hard one: its default, 1024, is for programs with select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = min(hard, MAX_FDS) if hard != resource.RLIM_INFINITY else MAX_FDS
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def accept_fd_limit() -> int:
    """The descriptor from which on no client is accepted: the rest is for workers, probes and
    logs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_FDS
    return soft - min(MAX_RESERVE, max(4, soft // 16))


def lowest_free_fd(open_fd: int) -> int:
    """The number that the next descriptor would get."""
    try:
        duplicate = os.dup(open_fd)
    except OSError:
        return MAX_FDS
    os.close(duplicate)
    return duplicate


def is_resource_exhaustion(error: BaseException) -> bool:
    """Whether this process, or the machine, is out of descriptors or memory."""
    return isinstance(error, OSError) and error.errno in EXHAUSTION_ERRNOS


MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")
MOUNTINFO: Final = Path("/proc/self/mountinfo")
MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs")


def free_bytes() -> int:
    """Available memory of the machine, or of the container if its limit is lower."""
    meminfo = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(
            line.split(" ", 1) for line in (CGROUP / "memory.stat").read_text().splitlines()
        )
    except OSError:
        return free
    if limit == "max":
        return free
    # The page cache counts as used, but the kernel reclaims it first.
    return min(free, int(limit) - used + int(statistics.get("inactive_file", 0)))


def is_memory_device(device: int) -> bool:
    """Whether files on this device (`st_dev`) are in memory: tmpfs or ramfs."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in MOUNTINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0] in MEMORY_FILE_SYSTEMS
    return False


# The thresholds of gc.set_threshold: new objects until a collection, and collections of one
# generation until the next older one is examined. A thousand workers that join create a hundred
# thousand objects within seconds.
THRESHOLDS: Final = 2_500, 5, 200


def collect_before_serving() -> None:
    """Collect once, and exempt all objects created so far from later collections. It takes tens of
    milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def exempt_objects() -> None:
    """Exempt the objects of started services, too. It takes no time."""
    gc.freeze()
