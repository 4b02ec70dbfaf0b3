"""A client of raw bytes, with h11 as the judge of what comes back."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11
import trio

from tests.promises.fakes import PATIENCE_SECS, RESET_ON_CLOSE

CHAT = b'{"messages": []}'
STREAMED = b'{"messages": [], "stream": true}'


@dataclass
class Answer:
    status: int = 0
    fields: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    interim: list[int] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [value for found, value in self.fields if found == name]

    def one(self, name: str) -> str | None:
        values = self.all(name)
        assert len(values) < 2, f"{name} is repeated: {values}"
        return values[0] if values else None


class Truncated(Exception):
    """The answer did not end as its framing promised. `answer` holds what came of it."""

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
    """One connection to the proxy; `rest` is what came and was not part of an answer yet."""

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
        """The next one, whole. Raises Truncated."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "proxy")]))
        parser.send(h11.EndOfMessage())
        if self.rest:  # nothing would tell it that the connection has ended
            parser.receive_data(self.rest)
        got = Answer()
        while True:
            try:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    parser.receive_data(await self.receive())
                    continue
            except (h11.RemoteProtocolError, trio.BrokenResourceError):
                raise Truncated(got) from None
            match event:
                case h11.InformationalResponse():
                    got.interim.append(event.status_code)
                case h11.Response():
                    got.status = event.status_code
                    got.fields = [
                        (name.decode(), value.decode("latin-1")) for name, value in event.headers
                    ]
                case h11.Data():
                    got.body += event.data
                case h11.EndOfMessage():
                    self.rest = parser.trailing_data[0]
                    return got
                case _:
                    raise Truncated(got)

    async def until(self, wanted: bytes) -> bytes:
        """Everything up to and with `wanted`."""
        while wanted not in self.rest:
            piece = await self.receive()
            assert piece, f"closed before {wanted!r}, after {self.rest!r}"
            self.rest += piece
        end = self.rest.index(wanted) + len(wanted)
        got, self.rest = self.rest[:end], self.rest[end:]
        return got

    async def until_closed(self) -> bytes:
        """What still comes before the proxy closes; a reset is a close too."""
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
    """`address` is HOST:PORT."""
    host, _, port = address.rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    async with stream:
        yield Client(stream)
