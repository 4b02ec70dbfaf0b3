"""Support for a build in one file (PyInstaller), which runs as two processes.

The outer one unpacks, starts the inner one, which is the whole program, and forwards signals; it
can't forward SIGKILL. Invariant: the inner one does not outlive the outer one, and gets each signal
once.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Final

POLL_SECS: Final = 0.5  # if the kernel has no pidfd
# Set in the environment of child processes; removed for other programs like all _PYI variables.
INSIDE: Final = "_PYI_OMNI_PROXY"


def is_frozen_binary() -> bool:
    """Whether this is the inner process of such a build."""
    if not getattr(sys, "frozen", False):
        return False
    return Path(sys.executable).parent not in Path(getattr(sys, "_MEIPASS", "")).parents


def prepare_frozen_binary() -> None:
    """Must be called first; does nothing outside such a build."""
    if not is_frozen_binary():
        return
    unpacked = Path(getattr(sys, "_MEIPASS", ""))
    # Started by the program itself, perhaps through a script: the folder belongs to that process.
    inside = os.environ.get(INSIDE) == str(unpacked)
    os.environ[INSIDE] = str(unpacked)
    starter = os.getppid()
    if _is_us(starter):
        folder = None if inside else unpacked
        start_cleanup_process(starter, folder)
    elif not inside:  # the outer one was killed before this check
        _end(unpacked)


def lead_process_group() -> None:
    """Start a new process group. In the old one the inner process would get Ctrl-C twice: from the
    terminal, and forwarded by the outer process."""
    if is_frozen_binary():
        os.setpgid(0, 0)


def start_cleanup_process(starter: int, unpacked: Path | None) -> None:
    """SIGKILL this process when the process `starter` ends, and delete the folder."""
    arguments = (starter, unpacked)
    threading.Thread(target=_follow, args=arguments, name="one-file", daemon=True).start()


def _follow(starter: int, unpacked: Path | None) -> None:
    # Signals are delivered to the other threads, which handle them.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        descriptor = os.pidfd_open(starter)
    except (OSError, AttributeError):
        never = threading.Event()
        while os.getppid() == starter:
            never.wait(POLL_SECS)
    else:
        # A pid that was reused in the meantime is not the parent.
        if os.getppid() == starter:
            exited = select.poll()  # select refuses descriptors from 1,024 on
            exited.register(descriptor, select.POLLIN)
            exited.poll()
    _end(unpacked)


def _end(unpacked: Path | None) -> None:
    if unpacked is not None:
        shutil.rmtree(unpacked, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_us(process: int) -> bool:
    try:
        return os.path.samefile(f"/proc/{process}/exe", "/proc/self/exe")
    except OSError:
        return False
