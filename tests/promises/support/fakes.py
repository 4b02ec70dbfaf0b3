"""Workers on raw sockets that send exactly the bytes of a test's script."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

PATIENCE_SECS = 90  # a deadline for hung tests, not a claim about speed
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def fields_of(head: bytes) -> list[tuple[str, str]]:
    """Returns all header fields in order, with names in lower case."""
    fields = [line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:] if line]
    return [(name.lower(), value.strip()) for name, _, value in fields]


class Call:
    """One connection to a fake worker, with the head and the body of its latest request."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.head = self.body = b""
        self._rest = b""

    async def receive(self) -> bytes:
        with trio.fail_after(PATIENCE_SECS):
            return await self.stream.receive_some(65536)

    async def next_request(self) -> bool:
        """Reads a request. Returns False if the proxy has closed the connection."""
        while b"\r\n\r\n" not in self._rest:
            piece = await self.stream.receive_some(65536)
            if not piece:
                return False
            self._rest += piece
        self.head, self._rest = self._rest.split(b"\r\n\r\n", 1)
        counted = re.search(rb"\ncontent-length: *(\d+)", self.head, re.IGNORECASE)
        length = int(counted[1]) if counted else 0
        while len(self._rest) < length:
            piece = await self.receive()
            if not piece:
                return False
            self._rest += piece
        self.body, self._rest = self._rest[:length], self._rest[length:]
        return True

    @property
    def line(self) -> str:
        return self.head.decode("latin-1").partition("\r\n")[0]

    @property
    def fields(self) -> list[tuple[str, str]]:
        return fields_of(self.head)

    async def send(self, *pieces: bytes) -> None:
        with trio.fail_after(PATIENCE_SECS):
            await self.stream.send_all(b"".join(pieces))

    def reset(self) -> None:
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.close()

    def close(self) -> None:
        self.stream.socket.close()

    async def until_left(self) -> None:
        """Waits until the proxy has closed this connection."""
        try:
            while await self.receive():
                pass
        except trio.BrokenResourceError:
            pass


Script = Callable[[Call], Awaitable[None]]


class FakeWorker:
    """Runs its script for each request, and answers health probes without it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        self.calls: list[Call] = []  # one for each connection that carried a request
        self.requests: list[tuple[str, bytes]] = []

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = "http://{}:{}".format(*listener.socket.getsockname())
        await trio.serve_listeners(self._connection, [listener], task_status=task_status)

    async def _connection(self, stream: trio.SocketStream) -> None:
        call = Call(stream)
        try:
            while await call.next_request():
                if call.line.startswith("GET /health "):
                    await call.send(counted(b'{"status": "ok"}'))
                    continue
                self.requests.append((call.line, call.body))
                if call not in self.calls:
                    self.calls.append(call)
                await self.script(call)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the proxy or the script closed the connection


@asynccontextmanager
async def fake_workers(*scripts: Script) -> AsyncIterator[list[FakeWorker]]:
    started = [FakeWorker(script) for script in scripts]
    async with trio.open_nursery() as nursery:
        for worker in started:
            await nursery.start(worker.serve)
        yield started
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def unreachable_url() -> AsyncIterator[str]:
    """Yields a URL that refuses connections: its port is bound, but nothing listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield "http://{}:{}".format(*holder.getsockname())


def counted(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *fields]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


LAST_CHUNK = chunk(b"")
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def answering(*pieces: bytes) -> Script:
    """A script that sends these bytes for each request and stays open."""

    async def script(call: Call) -> None:
        await call.send(*pieces)

    return script


def hanging_up_after(*pieces: bytes) -> Script:
    async def script(call: Call) -> None:
        await call.send(*pieces)
        call.close()

    return script


async def resetting(call: Call) -> None:
    call.reset()


async def silent(call: Call) -> None:
    await call.until_left()
