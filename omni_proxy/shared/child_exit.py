"""The end of a child process: it has time to end by itself, then it is killed; its status as text.

For all children that end with their socket, of the proxy and of the replica.
"""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import trio

EXIT_SECS: Final = 2.0  # from the end of its socket to SIGKILL


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
