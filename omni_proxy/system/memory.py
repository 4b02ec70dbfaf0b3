"""Free memory of the machine or its container, and whether files are in memory (tmpfs, ramfs).

Linux only. Blocking, but these files of the kernel answer at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

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
