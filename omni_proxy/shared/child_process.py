"""Child processes of the program, of the proxy and of the replica: the arguments that start the
program again, and the end of a child.

All processes of the program that are not forked are started with `program_argv`: from its modules,
an archive, or a frozen binary. A child that ends with its socket has time to end by itself, then it
is killed. Must import only the standard library, and trio only when it waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import trio

ARCHIVE: Final = ".pyz"
EXIT_SECS: Final = 2.0  # from the end of its socket to SIGKILL


def program_argv() -> list[str]:
    """The first arguments; those of the command follow."""
    if getattr(sys, "frozen", False):  # a frozen binary is its own interpreter
        return [sys.executable]
    if sys.argv[0].endswith(ARCHIVE):  # the modules can be imported only from the archive
        return [sys.executable, os.path.abspath(sys.argv[0])]
    return [sys.executable, "-m", "omni_proxy"]


async def wait_or_kill(child: trio.Process) -> int:
    """Returns its status."""
    import trio  # not for the program that starts a router as its child

    with trio.move_on_after(EXIT_SECS):
        return await child.wait()
    child.kill()
    return await child.wait()


def wait_or_kill_in_thread(child: subprocess.Popen[bytes], exit_secs: float = EXIT_SECS) -> None:
    """As `wait_or_kill`, for a thread without an event loop."""
    try:
        child.wait(exit_secs)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def exit_text(status: int) -> str:
    """A phrase after the name of the process."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-status}"
