"""Workers that respond as vLLM 0.32.0 does (captures/vllm-0.32.0-routes.txt), and their trainer."""

from __future__ import annotations

import hashlib
import json

import httpx

from omni_proxy.admin_ops.admin_route_table import BY_PATH
from omni_proxy.weight_sync.worker_calls import AdminCall
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import GatedEngines
from tests.weight_sync.trainer_fixture import Trainer

INIT, SHUTDOWN = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"
START, DRAFT = "/start_weight_update", "/start_draft_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
PAUSE, RESUME = "/pause", "/resume"
TENSORS = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 2], [3]]}
LOST = httpx.ReadError("gone")
ABSENT = {"detail": "Not Found"}
SGLANG_ONLY = (
    "/model_info", "/get_model_info", "/weights_checker", "/pause_generation",
    "/continue_generation", "/flush_cache", "/abort_request", "/destroy_weights_update_group",
    "/init_weights_update_group", "/update_weights_from_disk", "/load_lora_adapter",
)  # fmt: skip


def rpc_error(cause):
    """The error response of vLLM for an exception in its worker process."""
    message = (
        f"Call to collective_rpc method failed: Worker failed with error '{cause}', please check "
        "the stack trace above for the root cause"
    )
    return 500, {
        "error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    }


class VllmEngines(GatedEngines):
    """By URL: `kinds` ("vllm" or "sglang"), `ranks`, `labels` and `sums`, as set by tests.

    An engine keeps its state: paused, asleep, whether an update is open, and whether it still has
    tensors of a failed update (`collected`), which only a finish clears.
    """

    def __init__(self):
        super().__init__()
        self.kinds = {A: "vllm", B: "vllm"}
        self.ranks = {A: 2, B: 1}
        self.labels = {A: "default", B: "default"}
        self.paused, self.asleep, self.open, self.collected = set(), set(), set(), set()
        self.checker_needs_running = False

    def set_reply(self, url, path, body, status=200):
        if isinstance(body, tuple):  # a default response with a status
            status, body = body
        super().set_reply(url, path, body, status)

    def set_rpc_error(self, url, path, cause):
        status, body = rpc_error(cause)
        self.set_reply(url, path, body, status)

    async def respond(self, request, url, path):
        response = await super().respond(request, url, path)
        if self.kinds[url] == "vllm" and response.status_code == 200:
            self.change_state(url, path, json.loads(request.content or b"{}"))
        elif path == UPDATE and url in self.open:
            self.open.discard(url)
            self.collected.add(url)
        return response

    def change_state(self, url, path, body):
        """Apply what a successful call changes."""
        changes = {
            PAUSE: self.paused.add,
            RESUME: self.paused.discard,
            "/sleep": self.asleep.add,
            "/wake_up": self.asleep.discard,
            START: self.open.add,
            DRAFT: self.open.add,
            FINISH: self.open.discard,
        }
        if path in changes:
            changes[path](url)
        if path == FINISH:
            self.collected.discard(url)
        label = body.get("weight_version") if path == FINISH else None
        label = body.get("new_version") if path == "/update_weight_version" else label
        if label is not None:
            self.labels[url] = label

    def default_response(self, url, path):
        if self.kinds[url] == "sglang":
            if path == "/server_info":
                return {"tp_size": self.ranks[url]}
            sglang = path in SGLANG_ONLY or path == "/update_weight_version"
            return super().default_response(url, path) if sglang else (404, ABSENT)
        if path in SGLANG_ONLY or path == "/v1/load_lora_adapter":
            return 404, ABSENT
        responses = {
            PAUSE: {"status": "paused"},
            RESUME: {"status": "resumed"},
            "/is_paused": {"is_paused": url in self.paused},
            "/sleep": {"status": "sleeping", "level": 1},
            "/wake_up": {"status": "awake", "tags": None},
            "/is_sleeping": {"is_sleeping": url in self.asleep},
            "/get_world_size": {"world_size": self.ranks[url]},
            "/weight_info": {"weight_version": self.labels[url]},
            "/update_weight_version": {"success": True, "new_version": self.labels[url]},
            INIT: {"message": "Weight transfer initialized"},
            SHUTDOWN: {"message": "Weight transfer shut down"},
            START: {"message": "Weight update started"},
            DRAFT: {"message": "Draft weight update started"},
            UPDATE: {"message": "Weights updated"},
            FINISH: {"message": "Weight update finished"},
            "/reset_prefix_cache": {"success": True},
            "/abort_requests": {"status": "aborted", "aborted": 0},
            "/collective_rpc": {"results": [None]},
        }
        if path == "/weight_checker":
            if self.checker_needs_running and url in self.paused | self.asleep:
                return 409, {"error": {"message": "the engine is paused", "code": 409}}
            return {"checksums": self.checksums(url)}
        if path == SHUTDOWN and url in self.open:
            return rpc_error("Cannot release a trainer connection during a weight update")
        if path in (START, DRAFT) and url in self.open:
            return rpc_error(
                "start_weight_update called while a weight update is already active. Call "
                "finish_weight_update first."
            )
        if path == UPDATE and url not in self.open:
            return rpc_error("start_weight_update must be called before update_weights.")
        return responses.get(path, {"success": True})

    def checksums(self, url):
        return {
            f"dp0:pp0:pcp0:tp{rank}:{name}": hashlib.sha256(
                f"{self.sums[url]}{name}".encode()
            ).hexdigest()
            for rank in range(self.ranks[url])
            for name in ("model.embed", "model.qkv")
        }

    def targets(self, path, url=A):
        """Path and query of each call to this path."""
        port = int(url.rpartition(":")[2])
        requests = [r for r in self.requests if r.url.port == port and r.url.path == path]
        return [request.url.raw_path.decode() for request in requests]

    def bodies(self, path, url=A):
        port = int(url.rpartition(":")[2])
        requests = [r for r in self.requests if r.url.port == port and r.url.path == path]
        return [json.loads(r.content) if r.content else None for r in requests]


def vllm_call(path, body=None, *, query="", method="POST", **fields):
    raw = b"" if body is None else json.dumps(body).encode()
    target = f"{path}?{query}" if query else path
    return AdminCall(BY_PATH[path], method, target, raw, caller="trainer", **fields)


def init_info(store, **fields):
    return {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 4,
        **fields,
    }


class VllmTrainer(Trainer):
    """Submits calls of vLLM's dialect, and checks that each response is consistent."""

    async def ask(self, path, body=None, **fields):
        response = await self.api.operations.submit(vllm_call(path, body, **fields))
        assert response.ok is response.body["success"], response
        return response

    async def expect_ok(self, path, body=None, **fields):
        response = await self.ask(path, body, **fields)
        assert response.ok, response.body
        return response.body

    async def init(self, **fields):
        return await self.ask(INIT, {"init_info": init_info(self.store, **fields)})

    async def start(self):
        await self.join()
        return await self.expect_ok(START)

    async def round(self, version="v2"):
        await self.expect_ok(START)
        await self.expect_ok(UPDATE, {"update_info": TENSORS})
        return await self.expect_ok(FINISH, {"weight_version": version})
