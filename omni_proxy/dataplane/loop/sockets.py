"""The recv and send functions of a stream's socket. The native build uses `sockets.pyx` instead,
which makes the same system calls without Python's socket module."""

from __future__ import annotations

import socket
from collections.abc import Callable


def receiver(sock: socket.socket) -> Callable[..., bytes]:
    """A function with the signature of `sock.recv`."""
    return sock.recv


def sender(sock: socket.socket) -> Callable[[bytes | bytearray | memoryview], int]:
    """A function with the signature of `sock.send`."""
    return sock.send
