"""A socket of the door in the pump's epoll set: a client's or a worker's; and how to dial one.

Contract: nothing but a `Stream` touches its socket. It is registered once, edge triggered, so an edge
that nobody awaits is remembered in `readable`; it leaves the set at `close`, and the descriptor itself
is given back by the pump after the batch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable
from select import EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP
from typing import TYPE_CHECKING, Final

from omni_proxy.dataplane.loop.task import (
    ANY_STREAM,
    ClientDisconnected,
    ConnectionTask,
    EventHandler,
    pause,
)

if TYPE_CHECKING:
    from omni_proxy.dataplane.loop.event_loop import EventLoop

PEER_CLOSED: Final = EPOLLRDHUP | EPOLLHUP | EPOLLERR
HUNG_UP: Final = EPOLLHUP | EPOLLERR  # both directions are gone, not only its sending one
INPUT_EVENTS: Final = EPOLLIN | PEER_CLOSED
READ_WRITE: Final = EPOLLIN | EPOLLOUT  # what most events say; to compare is cheaper than to mask
MAX_PENDING_WRITERS: Final = (
    32  # then they leave at once: a millisecond is what anybody waits for others
)
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Stream:
    """A socket in the epoll set, a client's or a worker's; nothing else touches its socket.

    `readable`: there may be bytes to read. `peer_closed`: the peer has closed or broken its side. `pending`: what
    `put` has taken and nobody has sent yet; `send` itself must not be used before that has left.
    """

    __slots__ = (
        "closed",
        "fd",
        "idle_since",
        "loop",
        "on_idle_event",
        "peer_closed",
        "pending",
        "readable",
        "recv",
        "send",
        "sock",
        "task",
    )  # fmt: skip

    is_tls = False  # its bytes are sealed on the wire

    def __init__(self, loop: EventLoop, sock: socket.socket, task: EventHandler | None) -> None:
        self.loop = loop
        self.sock = sock
        self.fd = sock.fileno()
        self.recv = sock.recv
        self.send = sock.send
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

    def write_soon(self, piece: bytes) -> None:
        """Have it leave with the end of this turn of the pump, together with everybody else's.

        A peer that is woken finds all that there is for it, and is woken once: 15 us less for each
        request. What it does not take then stays here.
        """
        if self.pending:
            self.pending += piece
            return
        self.pending = piece
        waiting = self.loop.pending_writers
        waiting.append(self)
        if len(waiting) >= MAX_PENDING_WRITERS:
            self.loop.flush_writes()

    def flush(self) -> None:
        """As much of it as the peer takes now. A broken peer is told of by the next read."""
        if not self.pending:
            return
        late = self.pending
        try:
            sent = self.send(late)
            self.pending = b"" if sent == len(late) else late[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.pending = b""
            self.readable = self.peer_closed = True
            task = self.task
            if task is not None and (task.waiting_on is self or task.waiting_on is ANY_STREAM):
                self.loop.wake(task)

    def send_from(self, out: bytearray) -> int:
        """What the peer takes now, behind what is late; it is gone from `out` then. Raises
        OSError."""
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
        """What is there: None for nothing yet, b"" for the peer's end. Raises OSError."""
        try:
            piece = self.recv(size)
        except BlockingIOError:
            self.readable = False
            return None
        # A short read has emptied the socket; an end that was seen gives no new edge.
        self.readable = len(piece) == size or self.peer_closed
        return piece

    def unread(self, piece: bytes) -> None:
        """What the last read gave; the next one, of the same size, gives it again."""
        read = self.recv

        def give(_size: int, _flags: int = 0) -> bytes:
            self.recv = read
            return piece

        self.recv = give
        self.readable = True

    def sendmsg(self, pieces: list[bytes]) -> int:
        """As one `send` of all of them."""
        return self.sock.sendmsg(pieces)

    def has_input(self) -> bool:
        """Whether its peer has said something, or has left, that is still to be read."""
        return self.readable

    def send_eof(self) -> None:
        """Say that nothing more will come from us; what comes may still be read. Raises OSError."""
        self.sock.shutdown(socket.SHUT_WR)

    def peek(self, size: int) -> bytes | None:
        """As `read`, and all of it stays to be read. Raises OSError."""
        try:
            return self.recv(size, socket.MSG_PEEK)
        except BlockingIOError:
            self.readable = False
            return None

    def close(self, *, reset: bool = False) -> None:
        """Leave the set now; the socket itself is closed after the batch."""
        if not self.closed:
            self.closed = True
            if self.pending and not reset:
                self.flush()
            if reset:
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.loop.unregister(self.fd, self.sock)


async def connect(task: ConnectionTask, address: tuple[str, int] | str) -> Stream:
    """A new connection, owned by `task`. Raises OSError; the task's clock bounds it."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    conn = Stream(task.loop, sock, task)
    try:
        if code:
            task.waiting_on = conn
            await pause
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
        # A free port of our own range can be given to our own end: TCP's simultaneous open.
        if not isinstance(address, str) and sock.getsockname() == sock.getpeername():
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        conn.close()
        raise
    return conn
