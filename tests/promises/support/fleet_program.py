"""The real program as a process, and fake workers inside the test."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import trio

from omni_proxy.shared.watchdog import STALL_EVENT
from tests.program_forkserver import PROXY, Forked, forkserver
from tools.http_requests import RequestReader

KILLED_SECS = 5  # grace period of a program whose test failed
PATIENCE_SECS = 90  # a deadline for hung tests, not a claim about speed
POLL_SECS = 0.05  # between requests that wait for a state, which cost milliseconds of CPU time
PROBES = "[health]\ninterval_secs = 0.2\nsuccess_threshold = 1\non_threshold = 'unhealthy'\n"


class Worker:
    """Answers probes and model requests; a stream waits for `gate` before its second half."""

    def __init__(self, name: str) -> None:
        self.name, self.url = name, ""
        self.requests = self.connections = 0
        self.bodies: deque[dict] = deque(maxlen=8)  # of the latest requests
        self.gate = trio.Event()
        self.gate.set()
        self.halfway = trio.Event()
        self.fields: dict[str, str] = {}  # added to each response

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        await trio.serve_listeners(self._connection, [listener], task_status=task_status)

    async def _connection(self, stream: trio.SocketStream) -> None:
        requests, served = RequestReader(stream), False
        try:
            while received := await requests.read():
                head, body = received
                if head.startswith(b"GET "):
                    await stream.send_all(_counted(b'{"status": "ok"}'))
                    continue
                self.requests += 1
                self.connections += not served
                served = True
                self.bodies.append(json.loads(body))
                await self._answer(stream, self.bodies[-1])
        except trio.BrokenResourceError:
            return

    async def _answer(self, stream: trio.SocketStream, body: dict) -> None:
        if not body.get("stream"):
            self.halfway.set()
            await self.gate.wait()
            await stream.send_all(
                _counted(json.dumps({"worker": self.name, **self.fields}).encode())
            )
            return
        await stream.send_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + _event(self.name)
        )
        self.halfway.set()
        await self.gate.wait()
        await stream.send_all(_event("rest"))
        await stream.send_all(_event("[DONE]") + b"0\r\n\r\n")


def _counted(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def _event(text: str) -> bytes:
    payload = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(payload), payload)


@asynccontextmanager
async def workers(*names: str) -> AsyncIterator[list[Worker]]:
    started = [Worker(name) for name in names]
    async with trio.open_nursery() as nursery:
        for worker in started:
            await nursery.start(worker.serve)
        yield started
        nursery.cancel_scope.cancel()


def toml(fleet: Iterable[Worker], *, port: int = 0, more: str = "") -> str:
    entries = "".join(f'[[workers]]\nurl = "{worker.url}"\n' for worker in fleet)
    return f"[server]\nport = {port}\n{more}\n{PROBES}{entries}"


def chat(text: str = "hi", **fields: object) -> dict:
    return {"messages": [{"role": "user", "content": text}], **fields}


class Program:
    """A running `omni-proxy`; `log` has its stderr so far."""

    def __init__(self, process: trio.Process | Forked, stderr: trio.abc.ReceiveStream) -> None:
        self.process = process
        self._stderr = stderr
        self.log = ""
        self._more = trio.Event()
        self.client = httpx.AsyncClient(timeout=PATIENCE_SECS, trust_env=False, verify=False)

    async def listen(self) -> None:
        async for piece in self._stderr:
            self.log += piece.decode(errors="replace")
            self._more.set()
            self._more = trio.Event()
        self._more.set()

    async def until_logged(self, pattern: str) -> re.Match[str]:
        with trio.fail_after(PATIENCE_SECS):
            while not (found := re.search(pattern, self.log)):
                await self._more.wait()
            return found

    async def arrive(self) -> None:
        url = (await self.until_logged(r"listener_opened url=(http:[^\s\"]+)"))[1]
        self.client.base_url = httpx.URL(url)
        await self.until("/live", lambda body: body.get("status") == "alive")

    async def get_json(self, path: str) -> dict:
        return (await self.client.get(path)).json()

    async def until(self, path: str, holds: Callable[[dict], bool]) -> dict:
        """Repeats the GET until `holds(body)`; returns that body."""
        body: dict = {}
        try:
            with trio.fail_after(PATIENCE_SECS):
                while not holds(body := await self.get_json(path)):
                    await trio.sleep(POLL_SECS)
        except trio.TooSlowError:
            raise AssertionError(f"{path} stays at {json.dumps(body)[:2000]}\n{self.log}") from None
        return body

    async def until_routable(self, *fleet: Worker) -> dict:
        expected = {worker.url for worker in fleet}
        return await self.until("/workers", lambda body: routable(body) == expected)

    async def ask(self, **fields: object) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat(**fields))

    async def leave(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        with trio.fail_after(PATIENCE_SECS):
            return await self.process.wait()

    async def end(self) -> None:
        with trio.CancelScope(shield=True):
            await self.client.aclose()
            self.process.terminate()
            with trio.move_on_after(KILLED_SECS):
                await self.process.wait()
            self.process.kill()
            await self.process.wait()


def urls(listed: dict) -> list[str]:
    return [worker["url"] for worker in listed["workers"]]


def routable(listed: dict) -> set[str]:
    return {worker["url"] for worker in listed["workers"] if worker["routable"]}


def record(listed: dict, worker: Worker) -> dict:
    return next(entry for entry in listed["workers"] if entry["url"] == worker.url)


def put(file: Path, text: str) -> None:
    """Replaces a file atomically: writes another file and renames it."""
    written = file.with_name(f"{file.name}.new")
    written.write_text(text)
    written.rename(file)


@asynccontextmanager
async def program(*arguments: str | Path) -> AsyncIterator[Program]:
    """Starts the program and waits until it answers; ends it by SIGTERM, or kills it."""
    async with starting(*arguments) as running:
        await running.arrive()
        yield running


@asynccontextmanager
async def starting(*arguments: str | Path) -> AsyncIterator[Program]:
    """Starts the program without waiting for it; ends it like `program`."""
    stderr_pipe, stderr = os.pipe()
    async with trio.lowlevel.FdStream(stderr_pipe) as stream, trio.open_nursery() as nursery:
        try:
            process = await forkserver(*PROXY).start(*map(str, arguments), stderr=stderr)
        finally:
            os.close(stderr)
        running = Program(process, stream)
        nursery.start_soon(running.listen)
        try:
            yield running
            if process.returncode is None:
                assert await running.leave() == 0, running.log
            assert "Traceback" not in running.log, running.log
            assert STALL_EVENT not in running.log, running.log
        finally:
            await running.end()
            nursery.cancel_scope.cancel()
