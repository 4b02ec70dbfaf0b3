"""Streams: sockets of clients and workers in the event loop's epoll set; `connect`; and `IoTask`,
the task that reads and writes them.

Invariant: only a `Stream` uses its socket. It is registered once, edge-triggered, so an edge that
no task waits for is stored in `readable`. `close` unregisters it immediately; the event loop closes
the descriptor after the iteration. `read`, `write` and `flush` of a task wait for the peer until
the timeout of the current phase, and then raise PhaseTimeout. No phase outlasts `deadline`, which
bounds the whole exchange.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from math import inf
from select import EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP
from typing import Final

from omni_proxy.dataplane.loop.event_loop import EventLoop, PendingWriter, WakeCallback
from omni_proxy.dataplane.loop.sockets import receiver, sender
from omni_proxy.dataplane.loop.task import (
    ANY_STREAM,
    ClientDisconnected,
    ConnectionTask,
    EventHandler,
    pause,
)

READ_BYTES = 16384
PEER_CLOSED: Final = EPOLLRDHUP | EPOLLHUP | EPOLLERR
HUNG_UP: Final = EPOLLHUP | EPOLLERR  # both directions are closed, not only the peer's sending side
INPUT_EVENTS: Final = EPOLLIN | PEER_CLOSED
READ_WRITE: Final = EPOLLIN | EPOLLOUT  # the most frequent mask, compared first
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Stream(PendingWriter):
    """A socket in the epoll set, of a client or a worker.

    `readable`: there may be bytes to read. `peer_closed`: the peer has closed its sending side, or
    the connection failed. `pending`: bytes of `write_soon` that are not sent yet; while there are
    any, `send` must not be called directly.
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
        """Send `chunk` at the end of this iteration, together with those of other streams.

        So a peer wakes up once and finds all of its bytes. Bytes that the socket does not accept
        then stay in `pending`.
        """
        if self.pending:
            self.pending += chunk
            return
        self.pending = chunk
        self.loop.pending_writers.append(self)

    def flush(self) -> None:
        """Send as much of `pending` as the socket accepts. The next read reports an error."""
        pending, send = self.pending, self.send
        if not pending:
            return
        self.pending = b""
        try:
            sent = send(pending)
            if sent < len(pending):
                self.pending = pending[sent:]
        except BlockingIOError:
            self.pending = pending
        except OSError:
            self.readable = self.peer_closed = True
            self.loop.wake(WakeCallback(self.on_send_failure))

    def on_send_failure(self) -> None:
        """Step the task if it still waits for the stream; its next read reports the error."""
        task = self.task
        if task is not None and (task.waiting_on is self or task.waiting_on is ANY_STREAM):
            task.step()

    def send_from(self, out: bytearray) -> int:
        """Send `out` after the pending bytes, and remove the bytes that the socket accepted.

        Returns their number. Raises OSError.
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
        """Received bytes: None if none have arrived, b"" at the peer's close. Raises OSError."""
        recv = self.recv  # CPython calls a local faster than an attribute that is no method
        try:
            chunk = recv(size)
        except BlockingIOError:
            self.readable = False
            return None
        # A short read has drained the socket. A close is reported by no further edge.
        if len(chunk) == size:  # in an `if`, CPython 3.11 compares ints without a call
            self.readable = True
        else:
            self.readable = self.peer_closed
        return chunk

    def sendmsg(self, chunks: Sequence[bytes | memoryview]) -> int:
        """Send `chunks` as if they were joined."""
        return self.sock.sendmsg(chunks)

    def has_input(self) -> bool:
        """Whether bytes, or the peer's close, are still to be read."""
        return self.readable

    def send_eof(self) -> None:
        """Close the sending side; reading continues. Raises OSError."""
        self.sock.shutdown(socket.SHUT_WR)

    def shut_down(self) -> None:
        """Close both directions: the next read returns b""."""
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
        """Unregister the socket now; it is closed after the iteration."""
        if not self.closed:
            self.closed = True
            if self.pending and not reset:
                self.flush()
            if reset:
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.loop.unregister(self.fd, self.sock)


async def connect(task: ConnectionTask, address: tuple[str, int] | str) -> Stream:
    """Connect to (host, port) or a Unix socket's path; `task` receives the stream's events.

    Raises OSError. The task's `phase_deadline` limits the time.
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
    except OSError:  # the address is invalid
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
        # A socket can connect to itself if the port is free and ephemeral (TCP simultaneous open):
        # treat that as refused.
        if not isinstance(address, str) and sock.getsockname() == sock.getpeername():
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        stream.close()
        raise
    return stream


class IoTask(ConnectionTask):
    """A connection task that serves the stream `client`."""

    __slots__ = ("deadline",)

    client: Stream

    def __init__(self, loop: EventLoop) -> None:
        super().__init__(loop)
        self.deadline = inf

    def check_client(self, *, half_close_aborts: bool) -> None:
        """Raise ClientDisconnected if the client has closed its side and that counts as a
        disconnect. For the moments before and after waits that do not watch the client."""
        if half_close_aborts and self.client.peer_closed:
            raise ClientDisconnected

    def set_timeout(self, phase: str, secs: float) -> None:
        """Enter a phase that may last `secs`; with `inf`, as long as the whole exchange."""
        self.phase = phase
        due = self.loop.now + secs
        # Not min(), because the call would double the cost of this method.
        self.phase_deadline = due if due < self.deadline else self.deadline  # noqa: FURB136

    def limit_phase(self, due: float) -> None:
        """End the current phase no later than `due`, in seconds of `EventLoop.now`."""
        if due < self.phase_deadline:
            self.phase_deadline = due

    def clear_timeout(self) -> None:
        """The current phase has no timeout any more."""
        self.phase_deadline = inf

    async def read(self, stream: Stream, size: int = READ_BYTES) -> bytes:
        """The next bytes; b"" at the peer's end. Raises OSError for a broken connection."""
        while True:
            if self.must_wait_for(stream):
                await pause
            chunk = stream.read(size)
            if chunk is not None:
                return chunk

    async def write(self, stream: Stream, chunk: bytes) -> None:
        """Send `chunk` after the pending bytes; waits for a peer that reads slowly."""
        if stream.pending:
            await self.flush(stream)
        try:
            sent = stream.send(chunk)
        except BlockingIOError:
            sent = 0
        view = memoryview(chunk)[sent:]
        while view:
            self.waiting_on = stream
            await pause
            try:
                view = view[stream.send(view) :]
            except BlockingIOError:
                continue

    async def flush(self, stream: Stream) -> None:
        """Send the pending bytes of `write_soon`."""
        while stream.pending:
            stream.flush()
            if stream.pending:
                self.waiting_on = stream
                await pause
