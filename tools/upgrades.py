"""Measures upgrades under load: failures, descriptors, memory, and p99 with and without upgrades.

`python -m tools.upgrades [--upgrades N] [--clients N] [--processes N]`: starts a worker and the
proxy on loopback. Half of the clients send small requests on kept connections, a quarter reads long
streams, a quarter has WebSocket sessions of the same length. Exit status 1 if a request failed, or
a stream or a session was cut, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Event, Ping, Request, TextMessage

from omni_proxy.simulate.report import percentile
from tools.http_requests import RequestReader

EVENTS: Final = 40
EVENT_SECS: Final = 0.25
PAUSE_SECS: Final = 0.05  # between two requests of a client
APART_SECS: Final = 1.0  # between two upgrades
BODY: Final = b'{"messages": []}'
STREAMED: Final = b'{"messages": [], "stream": true}'


@dataclass
class Tally:
    """The clients' results."""

    millis: list[float] = field(default_factory=list)
    streams: int = 0
    sessions: int = 0
    failed: list[str] = field(default_factory=list)


class WebSocket:
    """One end of a WebSocket."""

    def __init__(
        self, stream: trio.SocketStream, kind: ConnectionType, received: bytes = b""
    ) -> None:
        self._stream = stream
        self._protocol = WSConnection(kind)
        if received:
            self._protocol.receive_data(received)

    async def send(self, event: Event) -> None:
        await self._stream.send_all(self._protocol.send(event))

    async def receive(self) -> Event:
        """The next event that is not a ping. Raises EOFError."""
        while True:
            for event in self._protocol.events():
                if isinstance(event, Ping):
                    await self.send(event.response())
                else:
                    return event
            chunk = await self._stream.receive_some(65536)
            if not chunk:
                raise EOFError("the connection was cut")
            self._protocol.receive_data(chunk)


async def echo(websocket: WebSocket) -> None:
    """A worker's side of a session: sends each text back."""
    with suppress(EOFError, trio.BrokenResourceError):
        while True:
            event = await websocket.receive()
            match event:
                case Request():
                    await websocket.send(AcceptConnection())
                case TextMessage():
                    await websocket.send(TextMessage(data=event.data))
                case CloseConnection():
                    await websocket.send(event.response())
                    return


async def serve_worker(stream: trio.SocketStream) -> None:
    requests = RequestReader(stream)
    try:
        while received := await requests.read():
            if received[0].startswith(b"GET /v1/audio/speech/stream"):
                await echo(WebSocket(stream, ConnectionType.SERVER, received[0] + b"\r\n\r\n"))
                return
            if b'"stream": true' not in received[1]:
                await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                continue
            await stream.send_all(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            for number in range(EVENTS):
                event = b"data: %d\n\n" % number
                await stream.send_all(b"%x\r\n%b\r\n" % (len(event), event))
                await trio.sleep(EVENT_SECS)
            await stream.send_all(b"0\r\n\r\n")
    except trio.BrokenResourceError:
        return


def request(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def read_until(stream: trio.SocketStream, end: bytes) -> bytes:
    """Read until `end`; raises EOFError if the stream ends before it."""
    data = b""
    while end not in data:
        chunk = await stream.receive_some(65536)
        if not chunk:
            raise EOFError(f"cut after {data[-200:]!r}")
        data += chunk
    return data


async def send_requests(port: int, tally: Tally, stop: trio.Event) -> None:
    while not stop.is_set():
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            while not stop.is_set():
                started_at = time.monotonic()
                try:
                    await stream.send_all(request(BODY))
                    answer = await read_until(stream, b"\r\n\r\n{}")
                except (EOFError, trio.BrokenResourceError) as error:
                    tally.failed.append(f"request: {error!r}")
                    break
                tally.millis.append((time.monotonic() - started_at) * 1000)
                if b" 200 " not in answer[:20]:
                    tally.failed.append(f"request: {answer[:80]!r}")
                if b"connection: close" in answer.lower():
                    break
                await trio.sleep(PAUSE_SECS)


async def open_streams(port: int, tally: Tally, stop: trio.Event) -> None:
    while not stop.is_set():
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            try:
                await stream.send_all(request(STREAMED))
                data = await read_until(stream, b"0\r\n\r\n")
            except (EOFError, trio.BrokenResourceError) as error:
                tally.failed.append(f"stream: {error!r}")
                continue
            tally.streams += 1
            if data.count(b"data: ") != EVENTS:
                tally.failed.append(f"stream of {data.count(b'data: ')} events")


async def run_websocket_sessions(port: int, tally: Tally, stop: trio.Event) -> None:
    while not stop.is_set():
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            try:
                await run_session(WebSocket(stream, ConnectionType.CLIENT))
            except (EOFError, trio.BrokenResourceError) as error:
                tally.failed.append(f"session: {error}")
                continue
            tally.sessions += 1


async def run_session(websocket: WebSocket) -> None:
    """Run a complete session. Raises EOFError, BrokenResourceError."""
    await websocket.send(Request(host="x", target="/v1/audio/speech/stream"))
    await expect(websocket, AcceptConnection)
    for number in range(EVENTS):
        await websocket.send(TextMessage(data=json.dumps({"type": "session.config", "n": number})))
        await expect(websocket, TextMessage)
        await trio.sleep(EVENT_SECS)
    await websocket.send(CloseConnection(code=1000))
    await expect(websocket, CloseConnection)


async def expect(websocket: WebSocket, kind: type[Event]) -> None:
    """Receive an event of `kind`; raises EOFError for any other."""
    event = await websocket.receive()
    if not isinstance(event, kind):
        raise EOFError(f"{event} instead of {kind.__name__}")


CLIENTS: Final = (
    send_requests, open_streams, send_requests, run_websocket_sessions,
)  # fmt: skip


def status(port: int) -> dict[str, object]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10) as answer:
        return dict(json.load(answer))


def resources(pid: int) -> tuple[int, int]:
    """The number of descriptors, and resident memory in MiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    resident = re.search(r"VmRSS:\s+(\d+)", text)
    return len(os.listdir(f"/proc/{pid}/fd")), int(resident[1]) // 1024 if resident else 0


async def upgrade(port: int) -> None:
    command = [sys.executable, "-m", "omni_proxy", "upgrade", "--url", f"http://127.0.0.1:{port}"]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.decode())


async def measure(port: int, clients: int, upgrades: int, secs: float) -> Tally:
    """Run the load during `upgrades` upgrades or, if there are none, for `secs`."""
    tally, stop = Tally(), trio.Event()
    async with trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(CLIENTS[number % len(CLIENTS)], port, tally, stop)
        await trio.sleep(APART_SECS)
        for _ in range(upgrades):
            await upgrade(port)
            await trio.sleep(APART_SECS)
        await trio.sleep(secs)
        stop.set()
    return tally


def line(name: str, tally: Tally, secs: float) -> str:
    ordered = sorted(tally.millis)
    half, most = percentile(ordered, 50), percentile(ordered, 99)
    return (
        f"{name}: {secs:.0f} s, {len(tally.millis)} requests, p50 {half:.1f} ms, "
        f"p99 {most:.1f} ms, "
        f"{tally.streams} whole streams, {tally.sessions} whole sessions, "
        f"{len(tally.failed)} failed"
    )


async def run(port: int, clients: int, upgrades: int) -> int:
    first = int(str((await trio.to_thread.run_sync(status, port))["pid"]))
    started_at = time.monotonic()
    calm = await measure(port, clients, 0, EVENTS * EVENT_SECS)
    calm_secs, started_at = time.monotonic() - started_at, time.monotonic()
    before = resources(first)
    tally = await measure(port, clients, upgrades, 0)
    print(line("without", calm, calm_secs))
    print(line(f"with {upgrades} upgrades", tally, time.monotonic() - started_at))
    await trio.sleep(2)
    last = int(str((await trio.to_thread.run_sync(status, port))["pid"]))
    print(
        f"descriptors and MiB: {before} at the start (process {first}), {resources(last)} ({last})"
    )
    for text in (calm.failed + tally.failed)[:10]:
        print(text)
    os.kill(last, signal.SIGTERM)
    return 1 if calm.failed or tally.failed else 0


async def main(clients: int, upgrades: int, processes: int) -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve_worker, [listener])
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "proxy.toml"
            worker = listener.socket.getsockname()[1]
            file.write_text(
                f"[server]\nport = {port}\nprocesses = {processes}\n"
                f'state_file = "off"\n[health]\nsuccess_threshold = 1\n'
                f'[[workers]]\nurl = "http://127.0.0.1:{worker}"\n'
            )
            log = (Path(folder) / "log").open("wb")
            command = [sys.executable, "-m", "omni_proxy", "--config", str(file)]
            with log:
                subprocess.Popen(command, stderr=log)  # noqa: ASYNC220  it returns at once
            await trio.sleep(1)
            with trio.fail_after(60):
                while not await _is_ready(port):  # noqa: ASYNC110  another process
                    await trio.sleep(0.2)
            result = await run(port, clients, upgrades)
        nursery.cancel_scope.cancel()
    return result


async def _is_ready(port: int) -> bool:
    try:
        return bool((await trio.to_thread.run_sync(status, port))["ready"])
    except OSError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrades", type=int, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    sys.exit(trio.run(main, given.clients, given.upgrades, given.processes))
