"""One end of the socket between control and a door: messages, and descriptors beside them.

Invariant: what is told goes out in its order; `tell` never waits. The descriptors of a message have
come when its bytes have, since the kernel keeps them with those bytes, and never those of two
messages at once; where they can't all be had, it has none.
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

from omni_proxy.multiprocess.messages import MessageFrames, ToControl, ToDoor, framed

READ_BYTES: Final = 1 << 18
MOST_DESCRIPTORS: Final = 250  # of one message; the kernel takes 253

Heard = TypeVar("Heard")


class IpcChannel(Generic[Heard]):
    """`decoder` is for what the other side says."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Heard]) -> None:
        sock.setblocking(False)
        self._sock = trio.socket.from_stdlib_socket(sock)
        self._decoder = decoder
        self._frames = MessageFrames()
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._more = trio.Event()
        self._emptied = trio.Event()
        self._parcels: deque[list[int] | None] = deque()  # None: there was no room for it
        self.told = 0  # messages
        self.waiting_bytes = 0

    def tell(self, message: ToDoor | ToControl, descriptors: Iterable[int] = ()) -> int:
        """Its number, from 1 on. `descriptors` are duplicated: the caller may close his. Raises
        OSError where they can't be, and nothing is told."""
        body = framed(message)
        self._outgoing.append((body, _duplicates(descriptors)))
        self.waiting_bytes += len(body)
        self.told += 1
        self._more.set()
        if self._emptied.is_set():
            self._emptied = trio.Event()
        return self.told

    def descriptors(self) -> list[int]:
        """Those of the next message that had some. Raises OSError where we may not open as many;
        they are lost then."""
        parcel = self._parcels.popleft()
        if parcel is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return parcel

    async def hear(self) -> list[Heard]:
        """The next messages; none at the end of the other side."""
        while True:
            space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
            try:
                data, beside, flags, _ = await self._sock.recvmsg(READ_BYTES, space)
            except ConnectionError:
                return []
            numbers = _rights(beside)
            if flags & socket.MSG_CTRUNC:
                _close(numbers)
                self._parcels.append(None)
            elif numbers:
                self._parcels.append(numbers)
            if not data:
                return []
            heard = [self._decoder.decode(body) for body in self._frames.feed(data)]
            if heard:
                return heard

    async def pass_on(self) -> None:
        """Write what is told, until cancelled or until nobody reads any more."""
        try:
            while True:
                while self._outgoing:
                    await self._send_first()
                self._emptied.set()
                self._more = trio.Event()
                await self._more.wait()
        except OSError:
            return  # who hears sees its end

    async def flushed(self) -> None:
        """Until all that was told has gone."""
        if self._outgoing:
            await self._emptied.wait()

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
        while self._parcels:
            _close(self._parcels.popleft() or ())


def _duplicates(numbers: Iterable[int]) -> list[int]:
    """All of them, or OSError and none."""
    made: list[int] = []
    try:
        made.extend(map(os.dup, numbers))
    except OSError:
        _close(made)
        raise
    return made


def _rights(beside: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, payload in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
    return found.tolist()


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)
