"""The limit of file descriptors: raises it at the start, and reserves some that clients don't get.

Invariant: an error caused by the proxy's own lack of descriptors or memory does not count against a
worker.
"""

from __future__ import annotations

import errno
import os
import resource
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
