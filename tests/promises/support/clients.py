"""A client that sends raw bytes and parses responses with h11."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11
import trio

from tests.promises.support.fakes import PATIENCE_SECS, RESET_ON_CLOSE

CHAT = b'{"messages": []}'
STREAMED = b'{"messages": [], "stream": true}'


@dataclass
class Answer:
    status: int = 0
    fields: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    interim: list[int] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [value for field_name, value in self.fields if field_name == name]

    def one(self, name: str) -> str | None:
        values = self.all(name)
        assert len(values) < 2, f"{name} is repeated: {values}"
        return values[0] if values else None


class Truncated(Exception):
    """The response ended before the end of its framing. `answer` has the part that was received."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(repr(answer))
        self.answer = answer


def post(
    body: bytes = CHAT,
    *fields: str,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    kind: str = "content-type: application/json",
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: proxy", f"content-length: {len(body)}", kind]
    return "\r\n".join([*lines, *fields, "", ""]).encode("latin-1") + body


class Client:
    """One connection to the proxy; `rest` has the received bytes after the last response."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.rest = b""

    async def send(self, *pieces: bytes) -> None:
        with trio.fail_after(PATIENCE_SECS):
            await self.stream.send_all(b"".join(pieces))

    async def receive(self) -> bytes:
        with trio.fail_after(PATIENCE_SECS):
            return await self.stream.receive_some(65536)

    async def answer(self, method: str = "POST") -> Answer:
        """Reads the next response. Raises Truncated."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "proxy")]))
        parser.send(h11.EndOfMessage())
        if self.rest:  # empty data would mean the end of the connection
            parser.receive_data(self.rest)
        received = Answer()
        while True:
            try:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    parser.receive_data(await self.receive())
                    continue
            except (h11.RemoteProtocolError, trio.BrokenResourceError):
                raise Truncated(received) from None
            match event:
                case h11.InformationalResponse():
                    received.interim.append(event.status_code)
                case h11.Response():
                    received.status = event.status_code
                    received.fields = [
                        (name.decode(), value.decode("latin-1")) for name, value in event.headers
                    ]
                case h11.Data():
                    received.body += event.data
                case h11.EndOfMessage():
                    self.rest = parser.trailing_data[0]
                    return received
                case _:
                    raise Truncated(received)

    async def until(self, wanted: bytes) -> bytes:
        """Reads up to and including `wanted`."""
        while wanted not in self.rest:
            piece = await self.receive()
            assert piece, f"closed before {wanted!r}, after {self.rest!r}"
            self.rest += piece
        end = self.rest.index(wanted) + len(wanted)
        received, self.rest = self.rest[:end], self.rest[end:]
        return received

    async def until_closed(self) -> bytes:
        """Reads until the proxy closes or resets the connection."""
        try:
            while piece := await self.receive():
                self.rest += piece
        except trio.BrokenResourceError:
            pass
        return self.rest

    def reset(self) -> None:
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.stream.socket.close()

    def close(self) -> None:
        self.stream.socket.close()


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[Client]:
    """Connects to `address`, which is HOST:PORT."""
    host, _, port = address.rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    async with stream:
        yield Client(stream)
