"""A listening socket of the event loop: accepts connections and passes each to a callback.

Invariant: it is bound before it is needed (only `open_socket` and the constructor may fail) and
closed once. Near the descriptor limit it stops accepting, logs that, and resumes at a later
`retry_accepting`, so that accepted connections get descriptors for their upstream connections.
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

from omni_proxy.dataplane.loop.event_loop import EventLoop, IoHandler
from omni_proxy.system.fd_limit import EXHAUSTION_ERRNOS, accept_fd_limit, lowest_free_fd
from omni_proxy.wire.proxy_protocol import format_peer

_log = logging.getLogger(__name__)

BACKLOG: Final = 4096
ACCEPTS_PER_EVENT: Final = 64  # so that other streams are not delayed


def open_socket(
    host: str, port: int, *, listening: bool = True, mode: int = 0o660
) -> socket.socket:
    """Bind a socket, and listen if `listening`: otherwise connections are refused until `listen`.

    `mode`: permissions of the file of a `unix:PATH` host. Raises OSError, also if `host` is no
    address of this machine.
    """
    if host.startswith("unix:"):
        return _open_unix_socket(host[5:], listening=listening, mode=mode)
    family, kind, proto, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        if listening:
            sock.listen(BACKLOG)
        else:  # with SO_REUSEADDR another program could bind the port while it does not listen
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _open_unix_socket(path: str, *, listening: bool, mode: int) -> socket.socket:
    """Replaces a stale socket file, on which no program listens. Raises OSError for other files."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale_file(path)
        sock.bind(path)
        os.chmod(path, mode)  # before a client can connect
        if listening:
            sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale_file(path: str) -> None:
    """Remove a stale socket file. Raises OSError if a program listens on it, or it is no socket."""
    try:
        stat_result = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(stat_result.st_mode):
        raise FileExistsError(errno.EEXIST, "a file of that name exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    if code in (0, errno.EAGAIN):  # EAGAIN: its backlog is full
        raise OSError(errno.EADDRINUSE, "another program listens on that socket")
    if code != errno.ECONNREFUSED:
        raise OSError(code, os.strerror(code))
    os.unlink(path)


class Listener(IoHandler):
    """`on_accept` is called with each accepted socket and the peer's address as text.

    `keeps_file`: do not remove the file of a Unix socket. Raises OSError if the socket can't be
    registered, after closing it.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        on_accept: Callable[[socket.socket, str], None],
        *,
        keeps_file: bool = False,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self.on_accept = on_accept
        self._stalled = False  # connections may be waiting that no event will report
        self._at_fd_limit = False  # near the descriptor limit: accept no more
        self._pause_logged = False  # the limit was logged; reset when the backlog is empty
        self._max_fd = accept_fd_limit()
        self._is_file = sock.family == socket.AF_UNIX
        self.address = _address_text(sock)
        removes = self._is_file and not keeps_file
        self._file = os.lstat(self.address[5:]) if removes else None
        self._fd = sock.fileno()
        if self.is_listening:
            try:
                loop.register(self._fd, self)
            except OSError:  # ENOSPC, ENOMEM: limits of epoll
                self.close()
                raise

    def listen(self) -> None:
        """Start listening, unless the socket already does. Raises OSError."""
        if not self.is_listening:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.listen(BACKLOG)
            self._loop.register(self._fd, self)

    def on_event(self, mask: int) -> None:
        if self._at_fd_limit:
            return
        for _ in range(ACCEPTS_PER_EVENT):
            try:
                sock, peer = self._sock.accept()
            except BlockingIOError:
                self._stalled = self._pause_logged = False
                return
            except ConnectionError:
                continue  # the client closed before it was accepted
            except OSError as error:
                self._on_accept_error(error)
                return
            at_limit = sock.fileno() >= self._max_fd
            try:
                self._accept_one(sock, peer)
            except OSError as error:  # epoll can't register the socket: close only this one
                sock.close()
                self._on_accept_error(error)
                return
            if at_limit:
                self._on_accept_error(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
                return
        self._loop.rearm(self._fd)  # more may be waiting, and epoll reports an edge only once

    def _accept_one(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        sock.setblocking(False)
        if self._is_file:
            self.on_accept(sock, "unix")
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.on_accept(sock, format_peer(peer[0], peer[1]))

    def retry_accepting(self) -> None:
        """Resume accepting after an error or the descriptor limit; called with each sweep."""
        self._max_fd = accept_fd_limit()
        if self._at_fd_limit:
            self._at_fd_limit = lowest_free_fd(self._fd) >= self._max_fd
        if self._stalled and not self._at_fd_limit and self._sock.fileno() >= 0:
            self.on_event(0)

    @property
    def is_listening(self) -> bool:
        return bool(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    def pause(self) -> None:
        """Accept nothing until `resume`; the socket stays open for processes that share it."""
        self._stalled = False
        self._loop.suspend(self._fd)

    def resume(self) -> None:
        """Accept again, including connections that arrived since `pause`. Can't fail."""
        with contextlib.suppress(ValueError):  # the event loop has ended
            self._loop.rearm(self._fd)

    def dup_socket(self) -> socket.socket:
        """A duplicate of the socket, to be closed by the caller. Raises OSError."""
        return self._sock.dup()

    def keep_file(self) -> None:
        """Keep the socket's file on close, because another program accepts on the socket."""
        self._file = None

    def take_file(self) -> None:
        """Remove the file of a Unix socket when this listener closes."""
        if self._is_file:
            with contextlib.suppress(OSError):
                self._file = os.lstat(self.address[5:])

    def set_file_mode(self, mode: int) -> None:
        """Set the permissions of a Unix socket's file."""
        if self._is_file:
            with contextlib.suppress(OSError):
                os.chmod(self.address[5:], mode)

    def close(self) -> None:
        if self._file is not None:
            self._remove_file(self._file)
        self._loop.unregister(self._fd, self._sock)

    def _remove_file(self, own_stat: os.stat_result) -> None:
        """Remove its file, unless another program has replaced it."""
        with contextlib.suppress(OSError):
            stat_result = os.lstat(self.address[5:])
            if (stat_result.st_dev, stat_result.st_ino) == (own_stat.st_dev, own_stat.st_ino):
                os.unlink(self.address[5:])

    def _on_accept_error(self, error: OSError) -> None:
        if error.errno not in EXHAUSTION_ERRNOS:
            _log.error("accept_failed listener=%s error=%s", self.address, error)
        else:
            if not self._pause_logged:
                _log.error("accept_paused listener=%s error=%s", self.address, error.strerror)
            self._at_fd_limit = self._pause_logged = True
        self._stalled = True


def _address_text(sock: socket.socket) -> str:
    """`host:port` as in a URL, or `unix:PATH`."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
