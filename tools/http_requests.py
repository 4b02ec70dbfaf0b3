"""Reads HTTP/1.1 requests from a stream, for simulated workers of tools and tests.

It supports only bodies with a content-length and validates nothing.
"""

from __future__ import annotations

import re

import trio

CHUNK_BYTES = 65536
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class RequestReader:
    """The requests of one connection, in order."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._rest = b""

    async def read(self) -> tuple[bytes, bytes] | None:
        """The next request's head, without its empty line, and body; None at the end of the stream.

        Raises trio.BrokenResourceError.
        """
        while b"\r\n\r\n" not in self._rest:
            if not await self._receive():
                return None
        head, self._rest = self._rest.split(b"\r\n\r\n", 1)
        counted = LENGTH.search(head)
        length = int(counted[1]) if counted else 0
        while len(self._rest) < length:
            if not await self._receive():
                return None
        body, self._rest = self._rest[:length], self._rest[length:]
        return head, body

    async def _receive(self) -> bool:
        chunk = await self._stream.receive_some(CHUNK_BYTES)
        self._rest += chunk
        return bool(chunk)
