"""WeightOperations in mode "coordinate" over two scripted workers, and a trainer's store."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import httpx
import trio

from omni_proxy.admin_ops.admin_route_table import BY_PATH
from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.weight_sync.worker_calls import AdminCall
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import GatedEngines, api_with

INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
PREPARE, COMPLETE = "/prepare_weights_update", "/complete_weights_update"
UPDATE, END = "/update_weights_from_distributed", "/end_weight_update"
CONTINUE, DISK = "/continue_generation", "/update_weights_from_disk"
TENSORS = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 2], [3]]}
BUCKETS = {"num_buckets": 1, "buckets": [TENSORS]}
LOST = httpx.ReadError("gone")


class SyncEngines(GatedEngines):
    """`ranks` by URL. A successful call with a `weight_version` sets the label of the worker."""

    def __init__(self):
        super().__init__()
        self.ranks = {A: 2, B: 1}
        self.tensors = ("a", "b")

    def default_response(self, url, path):
        if path == "/server_info":
            return {"tp_size": self.ranks[url]}
        if path == "/weights_checker":
            sums = dict.fromkeys(self.tensors, self.sums[url])
            data = {"full_checksum": self.sums[url], "checksums": sums}
            return {"results": [{"stage": "t", "data": data}]}
        if path == COMPLETE:
            return {"success": True, "num_buckets_received": 1}
        return super().default_response(url, path)

    async def respond(self, request, url, path):
        response = await super().respond(request, url, path)
        version = json.loads(request.content or b"{}").get("weight_version")
        if path in (COMPLETE, UPDATE) and response.status_code == 200 and version:
            self.labels[url] = version
        return response

    def bodies(self, path, url=A):
        port = int(url.rpartition(":")[2])
        requests = [r for r in self.requests if r.url.port == port and r.url.path == path]
        return [json.loads(request.content) for request in requests]


class TrainerStore:
    """A TCPStore that answers pings unless it is `silent`; `die` closes its connections."""

    def __init__(self, listener):
        self.port = listener.socket.getsockname()[1]
        self.silent = False
        self.connections = 0
        self._listener = listener
        self._scope = trio.CancelScope()

    async def run(self):
        with self._scope:
            await trio.serve_listeners(self._answer, [self._listener])

    async def _answer(self, stream):
        self.connections += 1
        greeting = b""
        async with stream:
            while len(greeting) < 5:
                greeting += await stream.receive_some(5 - len(greeting)) or b"x" * 5
            while ping := await stream.receive_some(5):
                if not self.silent:
                    await stream.send_all(ping[1:])

    def die(self):
        self._scope.cancel()


@asynccontextmanager
async def open_trainer_store(port=0):
    (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        store = TrainerStore(listener)
        nursery.start_soon(store.run)
        yield store
        store.die()


def init_body(store, **fields):
    return {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 4,
        "group_name": "g",
        "backend": "gloo",
        **fields,
    }


def trainer_call(path, **body):
    raw = json.dumps({"group_name": "g", **body}).encode()
    return AdminCall(BY_PATH[path], "POST", path, raw, caller="trainer")


def sync_api(folder, **fields):
    fields = {"mode": "coordinate", "stall_timeout_secs": 20.0, **fields}
    return api_with(folder, weight_sync=WeightSyncConfig(**fields))


def versions_by_url(api):
    return {w.url: (w.weight_label, w.weight_epoch) for w in api.fleet.workers}


def uncertain_workers(api):
    return sorted(api.operations.journal.uncertain)


class Trainer:
    """Submits calls, and checks that each response is consistent."""

    def __init__(self, api, store):
        self.api, self.store = api, store

    async def ask(self, path, **body):
        response = await self.api.operations.submit(trainer_call(path, **body))
        outcome = (response.body["success"], response.body["status"])
        assert outcome in ((True, "ok"), (True, "ready"), (False, "error")), response.body
        assert response.ok is response.body["success"], response
        return response

    async def expect_ok(self, path, **body):
        response = await self.ask(path, **body)
        assert response.ok, response.body
        return response.body

    async def init(self, **fields):
        return await self.ask(INIT, **init_body(self.store, **fields))

    async def join(self):
        response = await self.init()
        assert response.ok, response.body

    async def arm(self, **body):
        await self.join()
        return await self.expect_ok(PREPARE, **(body or BUCKETS))

    @property
    def state(self):
        return self.api.operations.sync.status()["state"]

    async def until(self, state):
        with trio.fail_after(30):
            while self.state != state:  # noqa: ASYNC110  # there is no event for a state
                await trio.sleep(0.01)
            if state == "idle":
                await self.api.operations.sync.lifecycle.wait_settled()
