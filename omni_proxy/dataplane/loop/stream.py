"""A socket of the door in the pump's epoll set: a client's or a worker's; and how to dial one.

Contract: nothing but a `Stream` touches its socket. It is registered once, edge triggered, so an edge
that nobody awaits is remembered in `hot`; it leaves the set at `close`, and the descriptor itself
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
    EITHER,
    ClientDisconnected,
    ConnectionTask,
    EventHandler,
    pause,
)

if TYPE_CHECKING:
    from omni_proxy.dataplane.loop.event_loop import EventLoop

LEFT: Final = EPOLLRDHUP | EPOLLHUP | EPOLLERR
CUT: Final = EPOLLHUP | EPOLLERR  # both directions are gone, not only its sending one
NEWS: Final = EPOLLIN | LEFT
READABLE: Final = EPOLLIN | EPOLLOUT  # what most events say; to compare is cheaper than to mask
LATE_AT_MOST: Final = 32  # then they leave at once: a millisecond is what anybody waits for others
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Stream:
    """A socket in the epoll set, a client's or a worker's; nothing else touches its socket.

    `hot`: there may be bytes to read. `ended`: the peer has closed or broken its side. `late`: what
    `put` has taken and nobody has sent yet; `send` itself must not be used before that has left.
    """

    __slots__ = (
        "closed", "ended", "fd", "hot", "idle_since", "late", "on_idle_news", "pump", "recv",
        "send", "sock", "task",
    )  # fmt: skip

    secure = False  # its bytes are sealed on the wire

    def __init__(self, pump: EventLoop, sock: socket.socket, task: EventHandler | None) -> None:
        self.pump = pump
        self.sock = sock
        self.fd = sock.fileno()
        self.recv = sock.recv
        self.send = sock.send
        self.hot = False
        self.ended = False
        self.closed = False
        self.late = b""
        self.task = task
        self.idle_since = 0.0
        self.on_idle_news: Callable[[Stream], None] | None = None
        pump.register(self.fd, self)

    def on_event(self, mask: int) -> None:
        if mask == READABLE:
            self.hot = True
        elif mask & NEWS:
            self.hot = True
            if mask & LEFT:
                self.ended = True
        if self.late:
            self.send_late()
        task = self.task
        if task is None:
            if mask & NEWS and self.on_idle_news is not None:
                self.on_idle_news(self)
        elif task.awaits is self or task.awaits is EITHER:
            task.step()
        elif mask & LEFT and self is task.client and task.counts_as_gone(mask):
            task.throw(ClientDisconnected())

    def put(self, piece: bytes) -> None:
        """Have it leave with the end of this turn of the pump, together with everybody else's.

        A peer that is woken finds all that there is for it, and is woken once: 15 us less for each
        request. What it does not take then stays here.
        """
        if self.late:
            self.late += piece
            return
        self.late = piece
        waiting = self.pump.late
        waiting.append(self)
        if len(waiting) >= LATE_AT_MOST:
            self.pump.send_late()

    def send_late(self) -> None:
        """As much of it as the peer takes now. A broken peer is told of by the next read."""
        if not self.late:
            return
        late = self.late
        try:
            sent = self.send(late)
            self.late = b"" if sent == len(late) else late[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.late = b""
            self.hot = self.ended = True
            task = self.task
            if task is not None and (task.awaits is self or task.awaits is EITHER):
                self.pump.resume(task)

    def send_from(self, out: bytearray) -> int:
        """What the peer takes now, behind what is late; it is gone from `out` then. Raises
        OSError."""
        self.send_late()
        if self.late or not out:
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
            self.hot = False
            return None
        # A short read has emptied the socket; an end that was seen gives no new edge.
        self.hot = len(piece) == size or self.ended
        return piece

    def put_back(self, piece: bytes) -> None:
        """What the last read gave; the next one, of the same size, gives it again."""
        read = self.recv

        def give(_size: int, _flags: int = 0) -> bytes:
            self.recv = read
            return piece

        self.recv = give
        self.hot = True

    def sendmsg(self, pieces: list[bytes]) -> int:
        """As one `send` of all of them."""
        return self.sock.sendmsg(pieces)

    def speaks(self) -> bool:
        """Whether its peer has said something, or has left, that is still to be read."""
        return self.hot

    def end_sending(self) -> None:
        """Say that nothing more will come from us; what comes may still be read. Raises OSError."""
        self.sock.shutdown(socket.SHUT_WR)

    def peek(self, size: int) -> bytes | None:
        """As `read`, and all of it stays to be read. Raises OSError."""
        try:
            return self.recv(size, socket.MSG_PEEK)
        except BlockingIOError:
            self.hot = False
            return None

    def close(self, *, reset: bool = False) -> None:
        """Leave the set now; the socket itself is closed after the batch."""
        if not self.closed:
            self.closed = True
            if self.late and not reset:
                self.send_late()
            if reset:
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.pump.forget(self.fd, self.sock)


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
    conn = Stream(task.pump, sock, task)
    try:
        if code:
            task.awaits = conn
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
