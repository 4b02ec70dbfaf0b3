"""What a build in one file needs beside the program: such a build is two processes.

The outer one unpacks, starts the inner one, which is all of this program, and hands on its signals.
A SIGKILL it can't hand on. Invariant: the inner one doesn't outlive the outer one, and hears of a
signal once.
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

POLL_SECS: Final = 0.5  # where the system has no descriptors of processes
# Set for what we start, and taken from other programs together with the rest of its kind.
INSIDE: Final = "_PYI_OMNI_PROXY"


def is_frozen_binary() -> bool:
    """Whether this is the inner process of such a build."""
    if not getattr(sys, "frozen", False):
        return False
    return Path(sys.executable).parent not in Path(getattr(sys, "_MEIPASS", "")).parents


def prepare_frozen_binary() -> None:
    """To be called first of all; does nothing where we are no such build."""
    if not is_frozen_binary():
        return
    unpacked = Path(getattr(sys, "_MEIPASS", ""))
    # Started by the program itself, by one of its scripts perhaps: then that is whose folder it is.
    inside = os.environ.get(INSIDE) == str(unpacked)
    os.environ[INSIDE] = str(unpacked)
    starter = os.getppid()
    if _is_us(starter):
        folder = None if inside else unpacked
        start_cleanup_process(starter, folder)
    elif not inside:  # the outer one was killed before we came to look
        _end(unpacked)


def lead_process_group() -> None:
    """Ctrl-C goes to a terminal's whole group: from the outer one we would hear of it again."""
    if is_frozen_binary():
        os.setpgid(0, 0)


def start_cleanup_process(starter: int, unpacked: Path | None) -> None:
    """End hard when the process `starter` ends; the folder goes too."""
    arguments = (starter, unpacked)
    threading.Thread(target=_follow, args=arguments, name="one-file", daemon=True).start()


def _follow(starter: int, unpacked: Path | None) -> None:
    # Signals are for the thread that waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        descriptor = os.pidfd_open(starter)
    except (OSError, AttributeError):
        never = threading.Event()
        while os.getppid() == starter:
            never.wait(POLL_SECS)
    else:
        # A number that was given to somebody else meanwhile is no child's parent.
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
