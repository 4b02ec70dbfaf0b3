"""WeightOperations over two scripted workers, without sockets."""

from __future__ import annotations

import json

import httpx
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.admin_ops.admin_route_table import BY_PATH
from omni_proxy.weight_sync.protocol.journal import Journal, decode
from omni_proxy.weight_sync.worker_calls import AdminCall
from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.admin_api.fake_engines import Engines

UPDATE, PAUSE = "/update_weights_from_disk", "/pause_generation"
LOST = httpx.ReadError("gone")


class GatedEngines(Engines):
    """A call without an entry in `replies` succeeds; `gates[url, path]` delays the response."""

    def __init__(self):
        super().__init__()
        self.gates, self.labels, self.sums = {}, {A: "v1", B: "v1"}, {A: "s", B: "s"}
        self.arrived, self.whole = {}, {}

    def close_gate(self, path, *urls):
        for url in urls or (A, B):
            self.gates[url, path] = trio.Event()
            self.arrived[url, path] = trio.Event()

    def open_gate(self, path, *urls):
        for url in urls or (A, B):
            self.gates[url, path].set()

    def paths(self, url=A):
        port = int(url.rpartition(":")[2])
        return [r.url.path for r in self.requests if r.url.port == port]

    async def answer(self, request):
        url = str(request.url.copy_with(raw_path=b"/")).rstrip("/")
        path = request.url.path
        if (url, path) not in self.replies:
            self.set_reply(url, path, self.default_response(url, path))
            response = await self.respond(request, url, path)
            del self.replies[url, path]
            return response
        return await self.respond(request, url, path)

    async def respond(self, request, url, path):
        if (url, path) in self.arrived:
            self.arrived[url, path].set()
            response = await super().answer(request)
            await self.gates[url, path].wait()
            return response
        return await super().answer(request)

    def default_response(self, url, path):
        if path == "/model_info":
            return {"success": True, "weight_version": self.labels[url]}
        if path == "/weights_checker":
            data = {"per_gpu_checksum": self.sums[url], "full_checksum": self.whole.get(url)}
            return {"results": [{"stage": "t", "data": data}]}
        return {"success": True}


def admin_call(path=UPDATE, body=None, **fields):
    raw = json.dumps({} if body is None else body).encode()
    return AdminCall(BY_PATH[path], "POST", path, raw, **fields)


def api_with(folder, **tables):
    api = build_api(entry(A), entry(B), folder=folder, **tables)
    api.healthy(A, B)
    return api


def cordon_reasons_of(api):
    return [sorted(worker.cordon_reasons) for worker in api.fleet.workers]


async def submit_all(api, *calls):
    """Submit several calls in this order; return their responses."""
    responses = [None] * len(calls)

    async def submit(at):
        responses[at] = await api.operations.submit(calls[at])

    async with trio.open_nursery() as nursery:
        for at in range(len(calls)):
            nursery.start_soon(submit, at)
            await wait_all_tasks_blocked()
    return responses


async def start_operation(engines, nursery, api, call, *urls):
    """Submit a call in the background; return when these workers have received it."""
    engines.close_gate(call.route.path, *urls)
    nursery.start_soon(api.operations.submit, call)
    for url in urls or (A, B):
        await engines.arrived[url, call.route.path].wait()


def read_journal(folder):
    path = folder / "journal.json"
    return decode(path.read_bytes()) if path.exists() else Journal()
