"""One end of the socket between control and a door: messages, and descriptors beside them.

Invariant: what is told goes out in its order; `tell` never waits. The descriptors of a message have
come when its bytes have, since the kernel keeps them with those bytes.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

import msgspec
import trio

from omni_proxy.doors.messages import Frames, ToControl, ToDoor, framed

READ_BYTES: Final = 1 << 18
MOST_DESCRIPTORS: Final = 250  # of one message; the kernel takes 253

Heard = TypeVar("Heard")


class Channel(Generic[Heard]):
    """`decoder` is for what the other side says."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Heard]) -> None:
        sock.setblocking(False)
        self._sock = trio.socket.from_stdlib_socket(sock)
        self._decoder = decoder
        self._frames = Frames()
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._more = trio.Event()
        self._emptied = trio.Event()
        self._descriptors: deque[int] = deque()
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

    def descriptor(self) -> int:
        """The next one that came along."""
        return self._descriptors.popleft()

    async def hear(self) -> list[Heard]:
        """The next messages; none at the end of the other side."""
        while True:
            space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
            try:
                data, beside, _, _ = await self._sock.recvmsg(READ_BYTES, space)
            except ConnectionError:
                return []
            for level, kind, payload in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    found = array.array("i")
                    found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
                    self._descriptors.extend(found)
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
        for number in numbers:
            os.close(number)

    def shut(self) -> None:
        """Nothing more is told: the other side hears all of it, then the end."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()
        while self._outgoing:
            for number in self._outgoing.popleft()[1]:
                os.close(number)
        while self._descriptors:
            os.close(self._descriptors.popleft())


def _duplicates(numbers: Iterable[int]) -> list[int]:
    """All of them, or OSError and none."""
    made: list[int] = []
    try:
        made.extend(map(os.dup, numbers))
    except OSError:
        for number in made:
            os.close(number)
        raise
    return made
