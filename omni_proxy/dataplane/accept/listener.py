"""A listening socket of the door: accepts, and hands each connection to a coroutine of its own.

Invariant: opened before it is needed (`open_socket` and the constructor, which alone may fail) and
closed once; short of the descriptor limit it stops, says so, and goes on at a later sweep, so
nothing that was accepted suffers: its worker's connection gets a descriptor, too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from typing import Final

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.system.fd_limit import EXHAUSTION_ERRNOS, accept_fd_limit, lowest_free_fd
from omni_proxy.wire.proxy_protocol import format_peer

_log = logging.getLogger(__name__)

BACKLOG: Final = 4096
ACCEPTS_PER_EVENT: Final = 64  # then the others get their turn


def open_socket(
    host: str, port: int, *, listening: bool = True, mode: int = 0o660
) -> socket.socket:
    """Bound, and listening unless that shall come later: until then connections are refused.

    `mode` is for the file of a `unix:PATH` host. Raises OSError (also for a host that is no address
    of this machine).
    """
    if host.startswith("unix:"):
        return _open_file(host[5:], listening=listening, mode=mode)
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


def _open_file(path: str, *, listening: bool, mode: int) -> socket.socket:
    """In the place of a socket file that nobody listens on any more; any other stays."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_way(path)
        sock.bind(path)
        os.chmod(path, mode)  # before anybody can connect
        if listening:
            sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _make_way(path: str) -> None:
    """Raises OSError where somebody listens there, or where it is no socket."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file of that name, and it is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    if code in (0, errno.EAGAIN):  # EAGAIN: its backlog is full
        raise OSError(errno.EADDRINUSE, "another program listens on that socket")
    if code != errno.ECONNREFUSED:
        raise OSError(code, os.strerror(code))
    os.unlink(path)


class Listener:
    """`on_accept` gets each accepted socket and the peer's address as text.

    `keeps_file`: that of a Unix socket is not ours to remove. Raises OSError where the socket can't
    be watched; it is closed then.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        welcome: Callable[[socket.socket, str], None],
        *,
        keeps_file: bool = False,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self.on_accept = welcome
        self._stalled = False  # somebody may wait of whom no event tells
        self._full = False  # no more are let in, for want of descriptors
        self._told = False  # of that, once until all who waited are in
        self._brim = accept_fd_limit()
        self._is_file = sock.family == socket.AF_UNIX
        self.address = _shown(sock)
        removes = self._is_file and not keeps_file
        self._file = os.lstat(self.address[5:]) if removes else None
        self._fd = sock.fileno()
        if self.is_listening:
            try:
                loop.register(self._fd, self)
            except OSError:  # ENOSPC, ENOMEM: bounds of epoll
                self.close()
                raise

    def listen(self) -> None:
        """Where the socket does not yet. Raises OSError."""
        if not self.is_listening:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.listen(BACKLOG)
            self._loop.register(self._fd, self)

    def on_event(self, mask: int) -> None:
        if self._full:
            return
        for _ in range(ACCEPTS_PER_EVENT):
            try:
                sock, peer = self._sock.accept()
            except BlockingIOError:
                self._stalled = self._told = False
                return
            except ConnectionError:
                continue  # it left before we came
            except OSError as error:
                self._refused(error)
                return
            full = sock.fileno() >= self._brim
            try:
                self._let_in(sock, peer)
            except OSError as error:  # epoll watches no more sockets: nobody else may suffer
                sock.close()
                self._refused(error)
                return
            if full:
                self._refused(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
                return
        self._loop.rearm(self._fd)  # more may wait, and an edge is not given twice

    def _let_in(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        sock.setblocking(False)
        if self._is_file:
            self.on_accept(sock, "unix")
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.on_accept(sock, format_peer(peer[0], peer[1]))

    def sweep(self) -> None:
        """Go on where accepting had to stop."""
        self._brim = accept_fd_limit()
        if self._full:
            self._full = lowest_free_fd(self._fd) >= self._brim
        if self._stalled and not self._full and self._sock.fileno() >= 0:
            self.on_event(0)

    @property
    def is_listening(self) -> bool:
        return bool(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    def pause(self) -> None:
        """Accept nobody until `work`; the socket goes on to listen, for others who have it."""
        self._stalled = False
        self._loop.suspend(self._fd)

    def resume(self) -> None:
        """Accept again, also those who came meanwhile. Can't fail."""
        with contextlib.suppress(ValueError):  # the pump has ended
            self._loop.rearm(self._fd)

    def dup_socket(self) -> socket.socket:
        """The same socket once more, to be closed by whoever asks."""
        return self._sock.dup()

    def set_file_mode(self, mode: int) -> None:
        """Who may connect, where it is a file."""
        if self._is_file:
            with contextlib.suppress(OSError):
                os.chmod(self.address[5:], mode)

    def close(self) -> None:
        if self._file is not None:
            self._remove(self._file)
        self._loop.unregister(self._fd, self._sock)

    def _remove(self, mine: os.stat_result) -> None:
        """Its file, unless another program has put its own there meanwhile."""
        with contextlib.suppress(OSError):
            found = os.lstat(self.address[5:])
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                os.unlink(self.address[5:])

    def _refused(self, error: OSError) -> None:
        if error.errno not in EXHAUSTION_ERRNOS:
            _log.error("accepting on %s failed: %s", self.address, error)
        else:
            if not self._told:
                _log.error("%s stops accepting for a moment: %s", self.address, error.strerror)
            self._full = self._told = True
        self._stalled = True


def _shown(sock: socket.socket) -> str:
    """As in a URL, without its scheme; `unix:PATH`."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
