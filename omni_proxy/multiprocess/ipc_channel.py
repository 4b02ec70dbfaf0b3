"""One end of the socket between the main process and a data-plane process.

It carries messages, and file descriptors beside them (SCM_RIGHTS, unix(7)). Invariant: messages
leave in the order of `send`, which never waits. The descriptors of a message arrive no later than
its bytes, since the kernel keeps them with those bytes, and never mixed with another message's;
where they can't all be received, none are.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Generic, TypeVar

import msgspec
import trio

from omni_proxy.multiprocess.messages import (
    MessageFrames,
    ProcessCommand,
    ProcessEvent,
    encode_frame,
)

READ_BYTES: Final = 1 << 18
MAX_DESCRIPTORS: Final = 250  # of one message; the kernel takes 253

Received = TypeVar("Received")


class IpcChannel(Generic[Received]):
    """`decoder` is for the other side's messages; `sent` counts ours."""

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

    def send(self, message: ProcessCommand | ProcessEvent, descriptors: Iterable[int] = ()) -> int:
        """Queue it; returns its number, from 1 on. `descriptors` are duplicated.

        Raises OSError where they can't be; then nothing is sent.
        """
        body = encode_frame(message)
        self._outgoing.append((body, _dup_all(descriptors)))
        self.waiting_bytes += len(body)
        self.sent += 1
        self._queued.set()
        if self._all_written.is_set():
            self._all_written = trio.Event()
        return self.sent

    def take_descriptors(self) -> list[int]:
        """Those of the next message that had some.

        Raises OSError (EMFILE) where this process may not open so many; then they are lost.
        """
        descriptors = self._received_fds.popleft()
        if descriptors is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptors

    async def receive(self) -> list[Received]:
        """The next messages; an empty list when the other side has closed."""
        while True:
            space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
            try:
                data, ancillary, flags, _ = await self._sock.recvmsg(READ_BYTES, space)
            except ConnectionError:
                return []
            numbers = _received_descriptors(ancillary)
            if flags & socket.MSG_CTRUNC:
                _close(numbers)
                self._received_fds.append(None)
            elif numbers:
                self._received_fds.append(numbers)
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
            return  # `receive` sees the end

    async def wait_flushed(self) -> None:
        """Until every queued message is written."""
        if self._outgoing:
            await self._all_written.wait()

    async def _send_first(self) -> None:
        body, numbers = self._outgoing[0]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))
        sent = await self._sock.sendmsg([body], [rights] if numbers else [])
        view = memoryview(body)[sent:]
        while view:
            view = view[await self._sock.send(view) :]
        self._outgoing.popleft()
        self.waiting_bytes -= len(body)
        _close(numbers)

    def shut(self) -> None:
        """Nothing more is told: the other side hears all of it, then the end."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()
        while self._outgoing:
            _close(self._outgoing.popleft()[1])
        while self._received_fds:
            _close(self._received_fds.popleft() or ())


def _dup_all(numbers: Iterable[int]) -> list[int]:
    """Duplicates of all, or OSError and none."""
    duplicates: list[int] = []
    try:
        duplicates.extend(map(os.dup, numbers))
    except OSError:
        _close(duplicates)
        raise
    return duplicates


def _received_descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return descriptors.tolist()


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)
