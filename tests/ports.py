"""Loopback ports for programs that take a number instead of choosing their own.

A port that the kernel chose and that was closed again may be anybody's a moment later: the end of
an outgoing connection, or another test's. These lie below what the kernel chooses from, in blocks
of which each belongs to one test process: whoever binds the block's abstract socket. Nobody gives
back; the kernel does when the process ends. A port is handed out again only after all others.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from functools import cache
from itertools import cycle

FIRST = 20000
LAST = 31999
BLOCK_SIZE = 200


def free_port() -> int:
    """One on which nobody listens at 127.0.0.1, and that no other test process will be given."""
    return free_run(1)


def free_run(count: int) -> int:
    """The first of `count` such ports next to each other."""
    ports, turns = _own()
    for _ in ports:
        first = next(turns)
        if first + count <= ports.stop and _free(range(first, first + count)):
            for _ in range(count - 1):
                next(turns)
            return first
    raise AssertionError(f"no {count} free ports in a row among {ports[0]} to {ports[-1]}")


def _free(ports: range) -> bool:
    with ExitStack() as stack:
        for port in ports:
            probe = stack.enter_context(socket.socket())
            # As servers do: a connection that has ended here keeps nobody from listening.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


@cache
def _own() -> tuple[range, cycle[int]]:
    """The block of this process, and its ports in turn. Its lock is held until the process ends."""
    for start in range(FIRST, LAST + 1, BLOCK_SIZE):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0omni-proxy-tests-ports-{start}")
        except OSError:
            lock.close()
            continue
        lock.detach()  # stays open with no object that would warn when the interpreter ends
        ports = range(start, start + BLOCK_SIZE)
        return ports, cycle(ports)
    raise AssertionError(f"all ports from {FIRST} to {LAST} belong to other test processes")
