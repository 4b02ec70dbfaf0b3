"""How a stream reads and writes its socket. The native build has `sockets.pyx` in its place, which
makes the same system calls without Python's socket module between."""

from __future__ import annotations

import socket
from collections.abc import Callable


def receiver(sock: socket.socket) -> Callable[..., bytes]:
    """As `sock.recv`, which it is here."""
    return sock.recv


def sender(sock: socket.socket) -> Callable[[bytes | bytearray | memoryview], int]:
    """As `sock.send`."""
    return sock.send
