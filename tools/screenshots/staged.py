"""A fleet with typical incidents, for screenshots: the real proxy over simulated workers.

One worker is slow, one dies during the run, one is being drained, and the last edit of the file is
refused.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import trio

from tools.http_requests import RequestReader
from tools.program_address import program_address

MODEL = "smollm2-135m"
CLIENTS = 14
WORDS = ("the", "sea", "is", "calm", "and", "wide", "tonight")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
LEFT = (trio.BrokenResourceError, trio.ClosedResourceError)


@dataclass(slots=True)
class FakeWorker:
    """A simulated worker, whose first chunk takes about `first_secs`."""

    first_secs: float
    version: str = "step-40"
    url: str = ""
    listener: trio.SocketListener | None = None
    life: trio.CancelScope = field(default_factory=trio.CancelScope)

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        (self.listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{self.listener.socket.getsockname()[1]}"
        with self.life:
            async with self.listener:
                task_status.started()
                async with trio.open_nursery() as nursery:
                    while True:
                        nursery.start_soon(self._connection, await self.listener.accept())

    async def _connection(self, stream: trio.SocketStream) -> None:
        requests = RequestReader(stream)
        async with stream:
            try:
                while received := await requests.read():
                    head, body = received
                    await self._answer(stream, head.split(b" ")[1].decode(), body)
            except LEFT:
                return

    async def _answer(self, stream: trio.SocketStream, path: str, body: bytes) -> None:
        if path == "/v1/chat/completions":
            await self._stream(stream)
            return
        if path == "/update_weights_from_disk":
            await trio.sleep(random.uniform(2, 4))
            self.version = json.loads(body)["weight_version"]
        reported = {"success": True, "message": "ok", "weight_version": self.version, "data": []}
        text = json.dumps(reported).encode()
        head = HEAD % b"application/json"
        await stream.send_all(head + b"content-length: %d\r\n\r\n%b" % (len(text), text))

    async def _stream(self, stream: trio.SocketStream) -> None:
        await trio.sleep(self.first_secs * random.lognormvariate(0, 0.35))
        await stream.send_all(HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
        tokens = 400 if random.random() < 0.05 else random.randrange(5, 20)
        for _ in range(tokens):
            await stream.send_all(_chunk(b'data: {"choices": []}\n\n'))
            await trio.sleep(0.05)
            if random.random() < 0.0002:
                await stream.aclose()  # like a worker that crashes
                return
        await stream.send_all(_chunk(b"data: %b\n\n" % json.dumps(_usage(tokens)).encode()))
        await stream.send_all(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _usage(tokens: int) -> dict[str, object]:
    prompt = random.randrange(40, 400)
    details = {"cached_tokens": int(prompt * random.uniform(0.3, 0.8))}
    counts = {"prompt_tokens": prompt, "completion_tokens": tokens}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": details}}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass(slots=True)
class Stage:
    """The running proxy at `url`, its traffic and its incidents."""

    url: str
    file: Path
    workers: list[FakeWorker]
    client: httpx.AsyncClient

    async def traffic(self) -> None:
        """Send requests until cancelled."""
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(self._ask, number)

    async def cause_incidents(self, secs: float) -> None:
        """Cause the incidents, within about `secs` seconds."""
        for number in (41, 42):
            await trio.sleep(secs * 0.3)
            await self._update(f"step-{number}")
        text = self.file.read_text()
        self.file.write_text(text + 'policy = "cache_aware"\n')
        await trio.sleep(secs * 0.2)
        self.workers[2].life.cancel()
        await trio.sleep(secs * 0.15)
        self.file.write_text(text + "max_total_retrys = 3\n")
        await self._drain(self.workers[3])
        await trio.sleep(secs * 0.05)

    async def _drain(self, worker: FakeWorker) -> None:
        name = worker.url.replace(":", "%3A").replace("/", "%2F")
        answer = await self.client.post(f"/workers/{name}/drain", json={"timeout_secs": 600})
        answer.raise_for_status()

    async def _update(self, label: str) -> None:
        body = {"model_path": "/weights/latest", "weight_version": label}
        await self.client.post("/update_weights_from_disk", json=body)

    async def _ask(self, number: int) -> None:
        words = [f"client {number}"]
        while True:
            message = {"role": "user", "content": " ".join(words)}
            body = {"model": MODEL, "stream": True, "messages": [message]}
            words = [*words[-40:], random.choice(WORDS)]
            try:
                async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    stop_chance = random.random()
                    async for _ in answer.aiter_bytes():
                        if random.random() < 0.001 * stop_chance:
                            break  # a user who stops reading
            except httpx.HTTPError:
                await trio.sleep(0.5)
            await trio.sleep(random.expovariate(1.5))


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Stage]:
    """Start the fleet; the proxy listens on a free port, with its files in `folder`."""
    fake_workers = [FakeWorker(secs) for secs in (0.11, 0.7, 0.1, 0.12)]
    async with trio.open_nursery() as nursery:
        for pretender in fake_workers:
            await nursery.start(pretender.serve)
        file = folder / "proxy.toml"
        file.write_text(_configuration(fake_workers))
        command = [sys.executable, "-m", "omni_proxy", "--config", str(file)]
        spawn = partial(trio.run_process, command, stderr=subprocess.PIPE, check=False)
        process = await nursery.start(spawn)
        url = await program_address(process)
        nursery.start_soon(_drop, process)
        client = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        try:
            async with client:
                yield Stage(url, file, fake_workers, client)
        finally:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)  # the second one: don't wait for requests
            nursery.cancel_scope.deadline = trio.current_time() + 10
            with trio.CancelScope(shield=True), trio.move_on_after(10):
                await process.wait()
            nursery.cancel_scope.cancel()


def _configuration(fake_workers: list[FakeWorker]) -> str:
    entries = "".join(
        f'[[workers]]\nurl = "{each.url}"\nmodel = "{MODEL}"\n\n' for each in fake_workers
    )
    health = "[health]\ninterval_secs = 1\nsuccess_threshold = 1\n\n"
    server = "[server]\nport = 0\nqueue_size = 100\nusage_metrics = true\n\n"
    return f"{server}{health}{entries}[routing]\n"


async def _drop(process: trio.Process) -> None:
    assert process.stderr is not None
    async for _ in process.stderr:
        pass
