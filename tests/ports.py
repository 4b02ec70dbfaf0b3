"""Loopback ports for programs that need a fixed port number.

A port that the kernel chose and that was closed again can be reused at once, by an outgoing
connection or by another test. The ports here are below the kernel's ephemeral range, in blocks.
Each block belongs to one test process, which locks it by binding an abstract socket; the kernel
releases it when the process ends. A port is returned again only after all others.
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
    """A port without a listener at 127.0.0.1 that no other test process uses."""
    return free_run(1)


def free_run(count: int) -> int:
    """The first of `count` consecutive free ports."""
    ports, port_cycle = _own()
    for _ in ports:
        first = next(port_cycle)
        if first + count <= ports.stop and _free(range(first, first + count)):
            for _ in range(count - 1):
                next(port_cycle)
            return first
    raise AssertionError(f"no {count} free ports in a row among {ports[0]} to {ports[-1]}")


def _free(ports: range) -> bool:
    with ExitStack() as stack:
        for port in ports:
            probe = stack.enter_context(socket.socket())
            # As servers do, so that ended connections do not prevent listening.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


@cache
def _own() -> tuple[range, cycle[int]]:
    """The block of this process, and an iterator over its ports. The lock is held until exit."""
    for start in range(FIRST, LAST + 1, BLOCK_SIZE):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0omni-proxy-tests-ports-{start}")
        except OSError:
            lock.close()
            continue
        lock.detach()  # stays open without a ResourceWarning at exit
        ports = range(start, start + BLOCK_SIZE)
        return ports, cycle(ports)
    raise AssertionError(f"all ports from {FIRST} to {LAST} belong to other test processes")
