"""WeightOperations in mode "receive" over two workers that load from the store, and a trainer."""

from __future__ import annotations

import json
from pathlib import Path

import trio

from omni_proxy.admin_ops.admin_route_table import BY_PATH
from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.process_group.broadcast.tensor_hashing import roll_up
from omni_proxy.weight_sync.worker_calls import AdminCall
from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.weight_sync.operation_fixture import GatedEngines
from tests.weight_sync.store.drafts import delete_store

DISK, CHECKER = "/update_weights_from_disk", "/weights_checker"
INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
PREPARE, COMPLETE = "/prepare_weights_update", "/complete_weights_update"
FIRST_DIGESTS = {"a": "first-a", "b": "first-b"}


class VersionEngines(GatedEngines):
    """`holds[url]`: the digests of its tensors; `failing_loads[url]`: how many loads fail."""

    def __init__(self):
        super().__init__()
        self.labels = {A: "default", B: "default"}
        self.holds = {A: FIRST_DIGESTS, B: FIRST_DIGESTS}
        self.failing_loads = {A: 0, B: 0}
        self.refuses = False

    def restart(self, url):
        self.holds[url], self.labels[url] = FIRST_DIGESTS, "default"

    async def respond(self, request, url, path):
        if path == DISK:
            self.load(url, json.loads(request.content))
        return await super().respond(request, url, path)

    def load(self, url, body):
        if self.refuses:
            self.set_reply(url, DISK, {"success": False, "message": "the model has no tensor"}, 400)
        elif self.failing_loads[url]:
            self.failing_loads[url] -= 1
            self.set_reply(url, DISK, {"success": False, "message": "out of memory"}, 500)
        else:
            record = json.loads((Path(body["model_path"]) / "record.json").read_bytes())
            self.holds[url] = {n: row["sha256"] for n, row in record["tensors"].items()}
            self.labels[url] = body.get("weight_version", self.labels[url])

    def default_response(self, url, path):
        if path == CHECKER:
            held = self.holds[url]
            data = {"checksums": held, "full_checksum": roll_up(held), "layout": {"tp_size": 1}}
            return {"results": [{"stage": "t", "data": data}]}
        return super().default_response(url, path)

    def loads(self, url=A):
        return self.paths(url).count(DISK)


class ReceiveHarness:
    """The proxy, and a trainer that has a group with it."""

    def __init__(self, engines, folder, pool, **fields):
        self.engines, self._pool = engines, pool
        self.settings = WeightSyncConfig(
            mode="receive", isolation="thread", init_timeout_secs=20, **fields
        )
        entries = (entry(A), entry(B))
        self.api = build_api(*entries, folder=folder, weight_sync=self.settings)
        self.operations = self.api.operations
        self.store = None

    async def start(self, nursery):
        await nursery.start(self.operations.run)
        self.store = self.operations.version_service.store_service.store
        self.api.healthy(A, B)

    def close(self):
        delete_store(self.store)

    async def ask(self, path, **body):
        raw = json.dumps({"group_name": "g", **body}).encode()
        return await self.operations.submit(AdminCall(BY_PATH[path], "POST", path, raw))

    async def sync(self, seed, label=None):
        """Run a whole two-phase sync; return the response to the complete call."""
        trainer = self._pool.trainer()
        trainer.order("open", group="g")
        port = (await trio.to_thread.run_sync(trainer.reply))["port"]
        place = {"master_address": "127.0.0.1", "master_port": port, "backend": "gloo"}
        joined = await self.ask(INIT, **place, rank_offset=1, world_size=2)
        assert joined.ok, joined.body
        assert trainer.reply() == {"joined": True}
        bucket = {"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[5], [3, 2]]}
        ready = await self.ask(PREPARE, num_buckets=1, buckets=[bucket])
        assert ready.ok, ready.body
        tensors = [["float32", [5], seed], ["bfloat16", [3, 2], seed]]
        await trio.to_thread.run_sync(lambda: trainer.tell("send", group="g", tensors=tensors))
        completed = await self.ask(COMPLETE, weight_version=label or f"v{seed}")
        destroyed = await self.ask(DESTROY)
        trainer.tell("destroy", group="g")
        assert destroyed.ok, destroyed.body
        return completed

    def versions(self):
        return [(w.weight_label, w.weight_epoch) for w in self.api.fleet.workers]

    def cordon_reasons(self):
        return [sorted(w.cordon_reasons) for w in self.api.fleet.workers]

    async def until(self, condition):
        with trio.fail_after(10):
            while not condition():  # noqa: ASYNC110  # threads change it
                await trio.sleep(0.01)
