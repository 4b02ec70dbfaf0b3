"""The end of a process that has a model runtime in it.

Invariant: the status is the one that was meant, whatever threads are still at work. What was said
is out by then. The interpreter's own end is never come to: it takes the lock away from a thread
inside torch, and frees a group under the thread that gloo holds in it; either aborts the process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Final, NoReturn

# Threads that only their peer lets go, where receiving is done in this process.
BLOCKED_THREAD_PREFIXES: Final = ("weights-init-", "weights-receive-", "weights-drop-")
JOIN_TIMEOUT_SECS: Final = 0.3  # for those that have just been told to end

log = logging.getLogger(__name__)


def exit_process(status: int) -> NoReturn:
    """End this process with `status`; one line of the log tells of threads that a peer holds."""
    if held := _held_threads():
        log.warning(
            "peers that do not answer hold threads, which end with this process: %s",
            ", ".join(held),
        )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it has gone before
            stream.flush()
    os._exit(status)


def _held_threads() -> list[str]:
    threads = [
        each for each in threading.enumerate() if each.name.startswith(BLOCKED_THREAD_PREFIXES)
    ]
    until = time.monotonic() + JOIN_TIMEOUT_SECS
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    return sorted(thread.name for thread in threads if thread.is_alive())
