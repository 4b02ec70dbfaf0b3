"""Descriptors: as many as we may have, a reserve for ourselves, and who is to blame without one.

Invariant: what fails because this process may open nothing more is never told of a worker.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

EXHAUSTION_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MAX_FDS: Final = 1 << 20  # beyond that a limit is none, and costs whoever walks through it
RESERVE_AT_MOST: Final = 64


def raise_fd_limit() -> None:
    """The soft limit of old, 1024, is for programs that still use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MAX_FDS) if hard != resource.RLIM_INFINITY else MAX_FDS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def accept_fd_limit() -> int:
    """From this descriptor on no client is let in: workers, probes and logs need some, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_FDS
    return soft - min(RESERVE_AT_MOST, max(4, soft // 16))


def lowest_free_fd(like: int) -> int:
    """The number that the next descriptor would get; `like` is one that is open."""
    try:
        probe = os.dup(like)
    except OSError:
        return MAX_FDS
    os.close(probe)
    return probe


def is_resource_exhaustion(failure: BaseException) -> bool:
    """Whether it says that we are out of descriptors or memory."""
    return isinstance(failure, OSError) and failure.errno in EXHAUSTION_ERRNOS
