"""Ends a process that contains a model runtime.

Invariant: the exit status is the given one, regardless of running threads, and output is flushed.
The interpreter's own shutdown is skipped: it would take the GIL from a thread inside torch, or free
a process group that a gloo thread uses; either aborts the process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Final, NoReturn

# Threads that block until their peer answers, if weights are received in this process.
BLOCKED_THREAD_PREFIXES: Final = ("weights-init-", "weights-receive-", "weights-drop-")
JOIN_TIMEOUT_SECS: Final = 0.3  # for threads that are ending

log = logging.getLogger(__name__)


def exit_process(status: int) -> NoReturn:
    """End this process with `status`; log the threads that are still blocked by a peer."""
    if blocked := _blocked_threads():
        log.warning(
            "threads_blocked_at_exit reason=peer_does_not_answer threads=%s",
            ",".join(blocked),
        )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may have closed it
            stream.flush()
    os._exit(status)


def _blocked_threads() -> list[str]:
    threads = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(BLOCKED_THREAD_PREFIXES)
    ]
    deadline = time.monotonic() + JOIN_TIMEOUT_SECS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return sorted(thread.name for thread in threads if thread.is_alive())
