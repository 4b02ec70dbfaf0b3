"""A minimal HTTP/1.1 implementation on trio streams, for the soak's clients and workers.

It is less strict than a proxy has to be: its only peers are the proxy and the soak itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import trio

PIECE_BYTES = 65536


class Broken(Exception):
    """An answer or the connection ended too early."""


@dataclass(slots=True)
class Message:
    """A request or an answer: first line, fields with names in lower case, and body."""

    line: str
    fields: dict[str, str]
    body: bytes = b""

    @property
    def status(self) -> int:
        return int(self.line.split(" ", 2)[1])


@dataclass(slots=True)
class Reader:
    """Reads messages from a stream, one after another."""

    stream: trio.SocketStream
    rest: bytes = field(default=b"")

    async def message(self, *, answer: bool) -> Message | None:
        """The next message; None if the stream ended before its first byte. Raises Broken."""
        head = await self._until(b"\r\n\r\n")
        if head is None:
            return None
        line, *lines = head.decode("latin-1").split("\r\n")
        pairs = (each.partition(":") for each in lines if each)
        message = Message(line, {name.lower(): value.strip() for name, _, value in pairs})
        if answer and message.status // 100 == 1:
            return await self.message(answer=True)
        if message.fields.get("transfer-encoding", "").lower() == "chunked":
            message.body = await self._chunked()
        else:
            message.body = await self._exactly(int(message.fields.get("content-length", "0")))
        return message

    async def _more(self) -> bool:
        try:
            piece = await self.stream.receive_some(PIECE_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Broken("connection reset") from None
        self.rest += piece
        return bool(piece)

    async def _until(self, mark: bytes) -> bytes | None:
        while mark not in self.rest:
            if not await self._more():
                if self.rest:
                    raise Broken("closed in the middle of a head")
                return None
        found, self.rest = self.rest.split(mark, 1)
        return found

    async def _exactly(self, length: int) -> bytes:
        while len(self.rest) < length:
            if not await self._more():
                raise Broken("closed in the middle of a body")
        found, self.rest = self.rest[:length], self.rest[length:]
        return found

    async def _chunked(self) -> bytes:
        body = b""
        while True:
            size = await self._until(b"\r\n")
            if size is None or not re.fullmatch(rb"[0-9a-fA-F]+", size):
                raise Broken(f"cut between chunks after {len(body)} bytes")
            piece = await self._exactly(int(size, 16) + 2)
            if size.strip(b"0") == b"":
                return body
            body += piece[:-2]


def counted(
    body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = ""
) -> bytes:
    """A complete answer with a content-length; `more` has further header lines with line ends."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{more}content-length: {len(body)}\r\n\r\n"
    return head.encode("latin-1") + body


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def asked(
    method: str, target: str, host: str, body: bytes = b"", fields: dict[str, str] | None = None
) -> bytes:
    """A complete request."""
    lines = {"host": host, **(fields or {})}
    if body or method != "GET":
        lines.setdefault("content-type", "application/json")
        lines["content-length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
