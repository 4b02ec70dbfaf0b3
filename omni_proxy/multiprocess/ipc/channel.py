"""The socket that carries the messages between the main process and a data-plane process.

Messages are MessagePack on one Unix socket; file descriptors are passed along (SCM_RIGHTS,
unix(7)).

Invariant: messages are sent in the order of `send`, which never waits, and take effect in that
order. The data-plane process acknowledges them in batches, each after it has taken effect. The
descriptors of a message arrive no later than its bytes, because the kernel attaches them to these
bytes, and are never mixed with another message's. If not all can be received, none are.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Generic, TypeVar

import msgspec
import trio
from msgspec import Struct

from omni_proxy.shared import fd_passing

LENGTH_BYTES: Final = 4

_encode = msgspec.msgpack.Encoder().encode


def encode_frame(message: Struct) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class MessageFrames:
    """Splits a byte stream into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) >= start + LENGTH_BYTES:
            end = start + LENGTH_BYTES + int.from_bytes(buffer[start : start + LENGTH_BYTES], "big")
            if len(buffer) < end:
                break
            yield bytes(buffer[start + LENGTH_BYTES : end])
            start = end
        del buffer[:start]


READ_BYTES: Final = 1 << 18

Received = TypeVar("Received")


class IpcChannel(Generic[Received]):
    """One side of the socket. `decoder` is for received messages; `sent` counts sent ones."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Received]) -> None:
        sock.setblocking(False)
        self._sock = trio.socket.from_stdlib_socket(sock)
        self._decoder = decoder
        self._frames = MessageFrames()
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._queued = trio.Event()
        self._all_written = trio.Event()
        self._received_fds: deque[list[int] | None] = (
            deque()
        )  # None: they could not all be received
        self.sent = 0  # messages
        self.waiting_bytes = 0

    def send(self, message: Struct, descriptors: Iterable[int] = ()) -> int:
        """Queue a message; returns its number, from 1 on. `descriptors` are duplicated.

        Raises OSError if they can't be duplicated; then nothing is sent.
        """
        body = encode_frame(message)
        self._outgoing.append((body, fd_passing.duplicate_all(descriptors)))
        self.waiting_bytes += len(body)
        self.sent += 1
        self._queued.set()
        if self._all_written.is_set():
            self._all_written = trio.Event()
        return self.sent

    def take_descriptors(self) -> list[int]:
        """Descriptors of the next message that carried any.

        Raises OSError (EMFILE) if they exceeded the process's descriptor limit; they are lost then.
        """
        descriptors = self._received_fds.popleft()
        if descriptors is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptors

    async def receive(self) -> list[Received]:
        """The next messages; an empty list when the other side has closed."""
        while True:
            try:
                data, ancillary, flags, _ = await self._sock.recvmsg(
                    READ_BYTES, fd_passing.ANCILLARY_BYTES
                )
            except ConnectionError:
                return []
            descriptors = fd_passing.descriptors_in(ancillary)
            if flags & socket.MSG_CTRUNC:
                fd_passing.close_all(descriptors)
                self._received_fds.append(None)
            elif descriptors:
                self._received_fds.append(descriptors)
            if not data:
                return []
            messages = [self._decoder.decode(body) for body in self._frames.feed(data)]
            if messages:
                return messages

    async def run_writer(self) -> None:
        """Write queued messages, until cancelled or until the other side has closed."""
        try:
            while True:
                while self._outgoing:
                    await self._send_first()
                self._all_written.set()
                self._queued = trio.Event()
                await self._queued.wait()
        except OSError:
            return  # `receive` returns the end

    async def wait_flushed(self) -> None:
        """Wait until every queued message is written."""
        if self._outgoing:
            await self._all_written.wait()

    async def _send_first(self) -> None:
        body, descriptors = self._outgoing[0]
        sent = await self._sock.sendmsg([body], fd_passing.ancillary_for(descriptors))
        view = memoryview(body)[sent:]
        while view:
            view = view[await self._sock.send(view) :]
        self._outgoing.popleft()
        self.waiting_bytes -= len(body)
        fd_passing.close_all(descriptors)

    def shut(self) -> None:
        """Close for writing: the other side reads all that was sent, then the end."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()
        while self._outgoing:
            fd_passing.close_all(self._outgoing.popleft()[1])
        while self._received_fds:
            fd_passing.close_all(self._received_fds.popleft() or ())
