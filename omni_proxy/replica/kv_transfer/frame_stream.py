"""Frames over a trio socket, for both sides of a transfer.

Invariant: a read returns all requested bytes or raises, and reads nothing beyond them. The caller
sets deadlines.
"""

from __future__ import annotations

from typing import Any, Self

import trio

from omni_proxy.replica.kv_transfer.wire import (
    HEADER,
    ConnectionEnded,
    FrameKind,
    Refuse,
    TransferFailed,
    WireError,
    header,
    parse,
    parse_header,
)


class FrameStream:
    """One connection; closes it as a context manager."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def read(self, count: int) -> bytes:
        """Exactly `count` bytes. Raises ConnectionEnded."""
        data = bytearray(count)
        await self.read_into(memoryview(data))
        return bytes(data)

    async def read_into(self, view: memoryview) -> None:
        """Fill `view`, whose items are bytes. Raises ConnectionEnded."""
        place = 0
        while place < len(view):
            await trio.lowlevel.checkpoint()
            try:
                count = await self._socket.recv_into(view[place:])
            except OSError as error:
                raise ConnectionEnded(f"the connection was lost: {error.strerror}") from None
            if not count:
                raise ConnectionEnded("the peer closed the connection")
            place += count

    async def read_header(self, begun: bytes = b"") -> tuple[FrameKind, int]:
        """The next frame's kind and length; `begun` is the part of the header already read.

        Raises ConnectionEnded and WireError.
        """
        return parse_header(begun + await self.read(HEADER.size - len(begun)))

    async def read_message(self, *kinds: FrameKind) -> tuple[FrameKind, bytes]:
        """The next frame, which must be of one of `kinds`.

        Raises TransferFailed for a refusal, ConnectionEnded and WireError.
        """
        kind, length = await self.read_header()
        if kind is FrameKind.REFUSE:
            raise TransferFailed(parse(await self.read(length), Refuse).reason)
        if kind not in kinds:
            raise WireError(f"unexpected {kind.name} frame")
        return kind, await self.read(length)

    async def read_head(self, max_bytes: int) -> bytes:
        """Read a complete HTTP head and return its first line.

        Raises ConnectionEnded, and WireError for a head of more than `max_bytes` bytes.
        """
        data = b""
        while b"\r\n\r\n" not in data:
            await trio.lowlevel.checkpoint()
            if len(data) >= max_bytes:
                raise WireError(f"an HTTP head of more than {max_bytes} bytes")
            data += await self.read(1)
        return data.partition(b"\r\n")[0]

    async def write(self, data: bytes | memoryview) -> None:
        """Raises ConnectionEnded."""
        view: Any = memoryview(data)
        while view:
            await trio.lowlevel.checkpoint()
            try:
                view = view[await self._socket.send(view) :]
            except OSError as error:
                raise ConnectionEnded(f"the connection was lost: {error.strerror}") from None

    async def write_data(self, data: memoryview) -> None:
        """Write a DATA frame. Raises ConnectionEnded."""
        await self.write(header(FrameKind.DATA, len(data)))
        await self.write(data)

    async def wait_closed(self) -> str:
        """Wait until the peer disconnects or, wrongly, sends data; return an error text."""
        try:
            data = await self._socket.recv(1)
        except OSError as error:
            return f"the decode replica disconnected: {error.strerror}"
        if data:
            return "the decode replica sent unexpected data"
        return "the decode replica disconnected"
