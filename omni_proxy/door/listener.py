"""A listening socket of the door: accepts, and hands each connection to a coroutine of its own.

Invariant: opened before it is needed (`open_socket`, which alone may fail) and closed once; at the
descriptor limit it stops, says so, and goes on at the next sweep, so nothing that was accepted
suffers.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

from omni_proxy.door.pump import Pump

_log = logging.getLogger(__name__)

BACKLOG: Final = 4096
ACCEPTS_PER_EVENT: Final = 64  # then the others get their turn
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def open_socket(host: str, port: int, *, listening: bool = True) -> socket.socket:
    """Bound, and listening unless that shall come later: until then connections are refused.

    Raises OSError (also for a host that is no address of this machine).
    """
    family, kind, proto, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        if listening:
            sock.listen(BACKLOG)
        else:  # a port that is only bound is free for all who want to use it again
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class Listener:
    """`welcome` gets each accepted socket and the peer's address as text."""

    def __init__(
        self, pump: Pump, sock: socket.socket, welcome: Callable[[socket.socket, str], None]
    ) -> None:
        self._pump = pump
        self._sock = sock
        self._welcome = welcome
        self._stalled = False
        host, port = sock.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._fd = sock.fileno()
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            pump.register(self._fd, self)

    def listen(self) -> None:
        """Where the socket does not yet. Raises OSError."""
        if not self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.listen(BACKLOG)
            self._pump.register(self._fd, self)

    def on_event(self, mask: int) -> None:
        for _ in range(ACCEPTS_PER_EVENT):
            try:
                sock, peer = self._sock.accept()
            except BlockingIOError:
                self._stalled = False
                return
            except ConnectionError:
                continue  # it left before we came
            except OSError as error:
                self._refused(error)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._welcome(sock, f"{peer[0]}:{peer[1]}")
        self._stalled = True  # more may wait, and an edge is not given twice

    def sweep(self) -> None:
        """Go on where accepting had to stop."""
        if self._stalled and self._sock.fileno() >= 0:
            self.on_event(0)

    def close(self) -> None:
        self._pump.forget(self._fd, self._sock)

    def _refused(self, error: OSError) -> None:
        if error.errno not in _NO_ROOM:
            _log.error("accepting on %s failed: %s", self.address, error)
        elif not self._stalled:
            _log.error("%s stops accepting for a moment: %s", self.address, error.strerror)
        self._stalled = True
