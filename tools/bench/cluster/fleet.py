"""Workers, proxies, a store and clients on loopback, for measurements of a cluster.

Workers and clients run in this process and count the requests that are really in flight at each
worker, not those that a proxy counts. Proxies and the store are processes. The workers don't model
an engine: each request takes a random time, independent of the load.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from tools.bench.harness.processes import running
from tools.bench.harness.proxies import free_port
from tools.bench.harness.simulated_worker import ANSWER, next_request

READY_SECS = 30
REACH = range(3)
SHARE = 1 / len(REACH)
NAMED = "x"  # the model of the first half of the workers


@dataclass
class Workers:
    """Simulated workers; `in_flight` is by worker, in the order of `urls`."""

    service_secs: tuple[float, float]
    urls: list[str] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(1))

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run one more worker until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        number = len(self.urls)
        self.urls.append(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
        self.in_flight.append(0)

        async def connection(stream: trio.SocketStream) -> None:
            rest = b""
            with contextlib.suppress(trio.BrokenResourceError):
                while (found := await next_request(stream, rest)) is not None:
                    head, _, rest = found
                    if head.startswith(b"POST"):
                        await self._work(number)
                    await stream.send_all(ANSWER)

        task_status.started()
        await trio.serve_listeners(connection, [listener])

    async def _work(self, number: int) -> None:
        self.in_flight[number] += 1
        try:
            await trio.sleep(self.random.uniform(*self.service_secs))
        finally:
            self.in_flight[number] -= 1


@contextmanager
def store() -> Iterator[str]:
    """Start a redis-server; yields its URL. Raises FileNotFoundError if it is not installed."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("neither valkey-server nor redis-server is installed")
    port = free_port()
    argv = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with running(argv, subprocess.DEVNULL):
        yield f"redis://127.0.0.1:{port}"


def configuration(urls: Sequence[str], port: int, more: str, *, max_inflight: int = 0) -> str:
    entries = "".join(
        f'[[workers]]\nurl = "{url}"\nmax_inflight = {max_inflight}\n'
        + (f'model = "{NAMED}"\n' if number < len(urls) // 2 else "")
        for number, url in enumerate(urls)
    )
    return (
        f"[server]\nport = {port}\nqueue_size = 1000\naccess_log = 'off'\nlog_level = 'warning'\n"
        f"[routing]\npolicy = 'least_request'\n[health]\ninterval_secs = 1\n"
        f"success_threshold = 1\n{more}\n{entries}"
    )


@asynccontextmanager
async def proxies(
    count: int, urls: Sequence[str], more: str = "", *, max_inflight: int = 0
) -> AsyncIterator[list[tuple[int, subprocess.Popen[str]]]]:
    """Start proxies; yields port and process of each when all accept requests."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = []
        for number in range(count):
            port, file = free_port(), folder / f"{number}.toml"
            file.write_text(configuration(urls, port, more, max_inflight=max_inflight))
            argv = [sys.executable, "-m", "omni_proxy", "--config", str(file)]
            found.append((port, stack.enter_context(running(argv, subprocess.DEVNULL))))
        for port, _ in found:
            await until_ready(port, len(urls))
            if "[cluster]" in more:
                await until_members(port, count)
        yield found


async def until_ready(port: int, workers: int) -> None:
    """Wait until all workers of the proxy are routable. Raises trio.TooSlowError."""
    wanted = f'"routable_workers":{workers}'
    with trio.fail_after(READY_SECS):
        while wanted not in (await fetch(port, "/ready")).replace(" ", ""):  # noqa: ASYNC110
            await trio.sleep(0.1)


async def until_members(port: int, count: int) -> None:
    """Wait until the proxy reports at least `count` members. Raises trio.TooSlowError."""
    with trio.fail_after(READY_SECS):
        while True:
            text = (await fetch(port, "/status")).partition("\r\n\r\n")[2]
            if json.loads(text or "{}").get("cluster", {}).get("members", 0) >= count:
                return
            await trio.sleep(0.05)


async def fetch(port: int, path: str) -> str:
    """The response's text; "" if there is none."""
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
    except OSError:
        return ""
    async with stream:
        await stream.send_all(
            f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode()
        )
        text = b""
        with contextlib.suppress(trio.BrokenResourceError):
            while piece := await stream.receive_some(65536):
                text += piece
        return text.decode(errors="replace")


@dataclass
class Clients:
    """A closed loop: each client sends its next request after the response to the last one.

    A third of the requests can only go to half of the workers: those of every third client or, with
    `drawn`, a random third.
    """

    ports: Sequence[int]
    drawn: bool = False
    answered: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self, count: int) -> None:
        """Run the clients until cancelled."""
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(self._client, number)

    async def _client(self, number: int) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", self.ports[number % len(self.ports)])
        named, plain = _request(NAMED), _request("")
        chance = random.Random(number)
        async with stream:
            while True:
                is_named = chance.random() < SHARE if self.drawn else number % len(REACH) == 0
                await stream.send_all(named if is_named else plain)
                text = await stream.receive_some(65536)
                if not text.startswith(b"HTTP/1.1 200"):
                    self.failures.append(text[:300].decode(errors="replace"))
                    if not text:
                        return
                self.answered += 1


def _request(model: str) -> bytes:
    body = b'{"model":"%b","messages":[]}' % model.encode() if model else b'{"messages":[]}'
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
        b"\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
