"""`omni-proxy router-process`: the proxy as the child of a process that called `launch_router`.

Contract: it reads its arguments from stdin, as one JSON object, and it does not outlive its parent:
when that ends, the kernel sends SIGTERM, and it drains. Its process name is that of the router that
it replaces, because scripts of trainers search for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from omni_proxy.cli.serve import router_startup, start
from omni_proxy.config.flags import Dialect, Startup

_SET_PARENT_DEATH_SIGNAL: Final = 1  # prctl(2)
_SET_NAME: Final = 15
ORPHANED: Final = 1
FROM_STDIN: Final = "-"


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parent's request: the arguments of `omni-proxy launch-router`, and its process id."""

    words: list[str]
    dialect: Dialect
    warnings: list[str]
    parent: int


def main(argv: Sequence[str]) -> int:
    if list(argv) != [FROM_STDIN]:
        raise SystemExit("router-process is internal: omni-proxy starts it for its Python API")
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    # The mask of blocked signals is inherited from the parent.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _set_process(f"{order.dialect}::router")
    if os.getppid() != order.parent:  # the parent ended before PDEATHSIG was set
        return ORPHANED
    return start(startup_of(order))


def startup_of(order: Order) -> Startup:
    """Raises ConfigError for invalid arguments."""
    return router_startup(order.words, order.dialect, tuple(order.warnings))


def _set_process(name: str) -> None:
    """Set the process name, and the signal at the end of the parent's thread, which waits for this
    process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_NAME, name.encode(), 0, 0, 0)
    libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
