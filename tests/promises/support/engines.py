"""Fake engines that record admin calls, and can be made to wait, fail or die."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tests.promises.support.fakes import Call, counted, fake_workers

TURNS = (
    "/pause_generation",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
)


class Engine:
    """`responses[path]` is the (status, body) of a reply; replies wait for `gates[path]`."""

    def __init__(self) -> None:
        self.url = ""
        self.version = "default"
        self.calls: list[tuple[str, dict]] = []
        self.headers: list[dict[str, str]] = []
        self.responses: dict[str, tuple[int, object]] = {}
        self.gates: dict[str, trio.Event] = {}
        self.asked: dict[str, trio.Event] = {}
        self.running: list[str] = []
        self.overlaps: list[tuple[str, ...]] = []
        self.dies_at = ""

    def wait_at(self, path: str) -> None:
        self.gates[path] = trio.Event()
        self.asked[path] = trio.Event()

    def paths(self, *wanted: str) -> list[str]:
        return [path for path, _ in self.calls if not wanted or path in wanted]

    async def script(self, call: Call) -> None:
        path = call.line.split()[1]
        body = json.loads(call.body) if call.body else {}
        self.calls.append((path, body))
        self.headers.append(dict(call.fields))
        if path not in TURNS:
            await self.answer(call, path, body)
            return
        self.running.append(path)
        if len(self.running) > 1:
            self.overlaps.append(tuple(self.running))
        try:
            await self.answer(call, path, body)
        finally:
            self.running.remove(path)

    async def answer(self, call: Call, path: str, body: dict) -> None:
        if path in self.asked:
            self.asked[path].set()
        if path in self.gates:
            await self.gates[path].wait()
        if path == self.dies_at:
            call.reset()
            return
        status, reply = self.responses.get(path, (200, self.default_response(path, body)))
        reason = {200: "OK", 400: "Bad Request", 404: "Not Found"}.get(status, "Error")
        payload = json.dumps(reply).encode()
        await call.send(counted(payload, "content-type: application/json",
                                status=f"{status} {reason}"))  # fmt: skip

    def default_response(self, path: str, body: dict) -> dict:
        if path.startswith("/update_weights") and body.get("weight_version"):
            self.version = body["weight_version"]
        if path == "/model_info":
            return {"success": True, "weight_version": self.version, "model_path": "m"}
        if path == "/weights_checker":
            data = {"per_gpu_checksum": f"sum of {self.version}", "full_checksum": "f"}
            return {"success": True, "results": [{"stage": "text", "data": data}]}
        return {"success": True, "message": "ok", "results": []}


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[Engine]]:
    started = [Engine() for _ in range(count)]
    async with fake_workers(*(engine.script for engine in started)) as listening:
        for engine, worker in zip(started, listening, strict=True):
            engine.url = worker.url
        yield started
