"""Processes that the bench starts, and their CPU time and memory.

Invariant: every process is ended, by id. Each leads its own session, so that Ctrl-C reaches only
the bench, and ending a process also ends its child processes.
"""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

END_SECS = 5.0


def end_on_signals() -> None:
    """Raise SystemExit on signals that end the program, so that its processes are ended."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def running(argv: Sequence[str], output: IO[str] | int) -> Iterator[subprocess.Popen[str]]:
    """Run a process; stdout and stderr both go to `output`, unless that is a pipe."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=None if output == subprocess.PIPE else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECS)
    with suppress(ProcessLookupError):  # processes left in the group of a leader that has ended
        os.killpg(process.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may contain any character."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                pid = int(entry.name)
                children.setdefault(int(_stat(pid)[1]), []).append(pid)
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def cpu_secs(root: int) -> float:
    """User and system time of a process and its descendants, including ended children."""
    ticks_per_sec = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in _tree(root):
        with suppress(OSError):
            ended_user, ended_system = _stat(pid)[13:15]
            total += (int(ended_user) + int(ended_system)) / ticks_per_sec
            # The CPU clock of another process (clock_getcpuclockid(3)): utime plus stime, but in
            # nanoseconds instead of hundredths of a second.
            total += time.clock_gettime((~pid << 3) | 2)
    return total


def rss_bytes(root: int) -> int:
    """Resident memory of a process and its descendants, counted exactly by the kernel."""
    total = 0
    for pid in _tree(root):
        with suppress(OSError):  # it has ended
            total += _rolled_up(pid)
    return total


def rss_mib(root: int) -> float:
    return rss_bytes(root) / 2**20


def _rolled_up(pid: int) -> int:
    """From smaps_rollup: /proc/PID/stat and status may be off by half a megabyte per core."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except PermissionError:
        return int(_stat(pid)[21]) * os.sysconf("SC_PAGE_SIZE")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, also for child processes; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
