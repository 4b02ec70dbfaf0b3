"""Fake engines that generate until an abort, with the abort route of SGLang or of vLLM."""

from __future__ import annotations

import json
import re

import trio

from tests.promises.support.fakes import LAST_CHUNK, SSE_HEAD, Call, FakeWorker, chunk, counted

_ID = re.compile(rb"\nx-request-id: *([^\r\n]+)", re.IGNORECASE)
SGLANG, VLLM = "/abort_request", "/abort_requests"


def event(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return chunk(b"data: %b\n\n" % text.encode())


class Engine(FakeWorker):
    """`running` has the ids of running requests, `aborts` the bodies of abort calls; updates wait
    for `gate`."""

    def __init__(self, route: str = SGLANG) -> None:
        super().__init__(self._answer)
        self.route = route
        self.running: dict[str, trio.Event] = {}
        self.aborts: list[dict] = []
        self.updating = trio.Event()
        self.gate = trio.Event()
        self.gate.set()

    async def _answer(self, call: Call) -> None:
        path = call.line.split()[1]
        if path in (SGLANG, VLLM):
            await self._abort(call, path)
        elif path == "/update_weights_from_disk":
            self.updating.set()
            await self.gate.wait()
            await call.send(counted(b'{"success": true}'))
        elif path in ("/generate", "/v1/chat/completions"):
            await self._generate(call)
        else:
            await call.send(counted(b"{}"))

    async def _generate(self, call: Call) -> None:
        body = json.loads(call.body)
        id_field = _ID.search(call.head)
        rid = body.get("rid") or (id_field[1].decode() if id_field else f"own-{len(self.requests)}")
        if not body.get("stream"):
            await call.send(counted(json.dumps({"id": rid}).encode()))
            return
        ended = self.running[rid] = trio.Event()
        try:
            await call.send(SSE_HEAD, event({"id": rid}))
            await ended.wait()
            await call.send(event({"id": rid, "finish_reason": "abort"}), event("[DONE]"))
            await call.send(LAST_CHUNK)
        finally:
            self.running.pop(rid, None)

    async def _abort(self, call: Call, path: str) -> None:
        if path != self.route:
            await call.send(counted(b'{"detail": "Not Found"}', status="404 Not Found"))
            return
        body = json.loads(call.body)
        self.aborts.append(body)
        matching = [ended for rid, ended in self.running.items() if self._matches(body, rid)]
        for ended in matching:
            ended.set()
        reply = {"status": "aborted", "aborted": len(matching)} if self.route == VLLM else ""
        await call.send(counted(json.dumps(reply).encode()))

    def _matches(self, body: dict, rid: str) -> bool:
        if self.route == VLLM:
            ids = body.get("request_ids")
            return ids is None or rid in ids
        if body.get("abort_all"):
            return True
        return rid.startswith(body["rid"]) if body.get("prefix") else rid == body["rid"]
