"""Sockets in the event loop's epoll set, of clients and of workers; and how to connect one.

Invariant: nothing but a `Stream` touches its socket. It is registered once, edge-triggered, so an
edge that no task waits for is kept in `readable`. `close` unregisters it at once; the event loop
closes the descriptor after the iteration.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from select import EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP
from typing import Final

from omni_proxy.dataplane.loop.event_loop import EventLoop, PendingWriter
from omni_proxy.dataplane.loop.sockets import receiver, sender
from omni_proxy.dataplane.loop.task import (
    ANY_STREAM,
    ClientDisconnected,
    ConnectionTask,
    EventHandler,
    pause,
)

PEER_CLOSED: Final = EPOLLRDHUP | EPOLLHUP | EPOLLERR
HUNG_UP: Final = EPOLLHUP | EPOLLERR  # both directions are closed, not only the peer's sending side
INPUT_EVENTS: Final = EPOLLIN | PEER_CLOSED
READ_WRITE: Final = EPOLLIN | EPOLLOUT  # what most events are; to compare is cheaper than to mask
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Stream(PendingWriter):
    """A socket in the epoll set, of a client or a worker.

    `readable`: there may be bytes to read. `peer_closed`: the peer has closed its sending side, or
    the connection broke. `pending`: bytes of `write_soon` that are not sent yet; while there are
    any, `send` itself must not be called.
    """

    __slots__ = (
        "closed", "fd", "idle_since", "loop", "on_idle_event", "peer_closed", "pending",
        "readable", "recv", "send", "sock", "task",
    )  # fmt: skip

    is_tls = False  # its bytes are encrypted on the wire

    def __init__(self, loop: EventLoop, sock: socket.socket, task: EventHandler | None) -> None:
        self.loop = loop
        self.sock = sock
        self.fd = sock.fileno()
        self.recv = receiver(sock)
        self.send = sender(sock)
        self.readable = False
        self.peer_closed = False
        self.closed = False
        self.pending = b""
        self.task = task
        self.idle_since = 0.0
        self.on_idle_event: Callable[[Stream], None] | None = None
        loop.register(self.fd, self)

    def on_event(self, mask: int) -> None:
        if mask == READ_WRITE:
            self.readable = True
        elif mask & INPUT_EVENTS:
            self.readable = True
            if mask & PEER_CLOSED:
                self.peer_closed = True
        if self.pending:
            self.flush()
        task = self.task
        if task is None:
            if mask & INPUT_EVENTS and self.on_idle_event is not None:
                self.on_idle_event(self)
        elif task.waiting_on is self or task.waiting_on is ANY_STREAM:
            task.step()
        elif mask & PEER_CLOSED and self is task.client and task.is_disconnect(mask):
            task.throw(ClientDisconnected())

    def write_soon(self, chunk: bytes) -> None:
        """Send it at the end of this iteration, together with what other streams send.

        So a peer wakes up once and finds everything that there is for it. What its socket does not
        take then stays in `pending`.
        """
        if self.pending:
            self.pending += chunk
            return
        self.pending = chunk
        loop = self.loop
        waiting = loop.pending_writers
        waiting.append(self)
        if len(waiting) >= loop.max_pending_writers:
            loop.flush_writes()

    def flush(self) -> None:
        """Send of `pending` what the socket takes now. The next read reports a broken peer."""
        pending, send = self.pending, self.send
        if not pending:
            return
        try:
            sent = send(pending)
            self.pending = b"" if sent == len(pending) else pending[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.pending = b""
            self.readable = self.peer_closed = True
            task = self.task
            if task is not None and (task.waiting_on is self or task.waiting_on is ANY_STREAM):
                self.loop.wake(task)

    def send_from(self, out: bytearray) -> int:
        """Send `out`, behind what is pending, and remove what the socket took from it.

        How many bytes that was. Raises OSError.
        """
        self.flush()
        if self.pending or not out:
            return 0
        try:
            sent = self.send(out)
        except BlockingIOError:
            return 0
        del out[:sent]
        return sent

    def read(self, size: int) -> bytes | None:
        """The bytes that are there: None for none yet, b"" for the peer's close. Raises OSError."""
        recv = self.recv  # CPython calls a local faster than an attribute that is no method
        try:
            chunk = recv(size)
        except BlockingIOError:
            self.readable = False
            return None
        # A short read has emptied the socket; a close that was seen gives no new edge.
        self.readable = len(chunk) == size or self.peer_closed
        return chunk

    def sendmsg(self, chunks: Sequence[bytes | memoryview]) -> int:
        """As one `send` of all `chunks`."""
        return self.sock.sendmsg(chunks)

    def has_input(self) -> bool:
        """Whether there are bytes, or the peer's close, still to be read."""
        return self.readable

    def send_eof(self) -> None:
        """Close the sending side; reading goes on. Raises OSError."""
        self.sock.shutdown(socket.SHUT_WR)

    def shut_down(self) -> None:
        """Both directions: the next read sees the end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def peek(self, size: int) -> bytes | None:
        """As `read`, without consuming the bytes. Raises OSError."""
        try:
            return self.recv(size, socket.MSG_PEEK)
        except BlockingIOError:
            self.readable = False
            return None

    def close(self, *, reset: bool = False) -> None:
        """Unregister now; the socket itself is closed after the iteration."""
        if not self.closed:
            self.closed = True
            if self.pending and not reset:
                self.flush()
            if reset:
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.loop.unregister(self.fd, self.sock)


async def connect(task: ConnectionTask, address: tuple[str, int] | str) -> Stream:
    """Connect to (host, port) or a Unix socket's path; `task` gets its events.

    Raises OSError; the task's `phase_deadline` bounds it.
    """
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    try:
        code = sock.connect_ex(address)
    except OSError:  # of an address that is none
        sock.close()
        raise
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    stream = Stream(task.loop, sock, task)
    try:
        if code:
            task.waiting_on = stream
            await pause
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
        # To a free port in the ephemeral range the socket can connect to itself (TCP simultaneous
        # open): that counts as refused.
        if not isinstance(address, str) and sock.getsockname() == sock.getpeername():
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        stream.close()
        raise
    return stream
