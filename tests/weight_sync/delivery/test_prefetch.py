import json

import pytest
import trio

from omni_proxy.process_group.receiver import FileRegion
from omni_proxy.process_group.tensor_plan import parse_plans
from omni_proxy.weight_sync.delivery.prefetch import PREFETCH_PATH, IncomingVersion
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.version_holders import COMPLETE, DESTROY, DISK, INIT, PREPARE, VersionEngines

torch = pytest.importorskip("torch")

PATIENCE_SECS = 60
TENSORS = [["float32", [500], 1], ["bfloat16", [30, 2], 2]]
BUCKETS = [
    {"names": [name], "dtypes": [dtype], "shapes": [shape]}
    for name, (dtype, shape, _) in zip("ab", TENSORS, strict=True)
]


class Loaders(VersionEngines):
    """Workers with the disk loader of the replica. `reads`: URLs that support prefetch."""

    def __init__(self, root, reads=(A, B)):
        super().__init__()
        from omni_proxy.replica.weights.live_tensors import LiveTensors
        from omni_proxy.replica.weights.weights_folder import WeightsFolder

        self.reads, self.targets, self.folders = reads, {}, {}
        for url in (A, B):
            model = torch.nn.Module()
            model.register_buffer("a", torch.zeros(500))
            model.register_buffer("b", torch.zeros(30, 2, dtype=torch.bfloat16))
            self.targets[url], self.folders[url] = LiveTensors(model), WeightsFolder("/")
        self.read = {A: trio.Event(), B: trio.Event()}

    async def respond(self, request, url, path):
        if path == PREFETCH_PATH:
            self.prefetch(url, json.loads(request.content))
        response = await super().respond(request, url, path)
        if path == PREFETCH_PATH:
            self.read[url].set()
        return response

    def prefetch(self, url, body):
        if url in self.reads:
            nbytes = self.folders[url].prefetch(body, self.targets[url])
            data = {"results": [{"stage": "t", "data": {"ahead_bytes": nbytes}}]}
            self.set_reply(url, PREFETCH_PATH, {"success": True, **data})
        else:
            self.set_reply(url, PREFETCH_PATH, {"detail": "Not Found"}, 404)

    def load(self, url, body):
        super().load(url, body)
        staged = self.folders[url].stage(body, self.targets[url])
        staged.apply_without_rollback()
        staged.forget()

    def sizes(self, url):
        port = int(url.rpartition(":")[2])
        requests = [r for r in self.requests if (r.url.port, r.url.path) == (port, PREFETCH_PATH)]
        return [json.loads(r.content)["nbytes"] for r in requests]

    def untouched(self, url):
        return all(not tensor.any() for _, tensor in self.targets[url])


@pytest.fixture
def reads():
    return (A, B)


@pytest.fixture
def engines(monkeypatch, folder, reads):
    return Loaders(folder, reads).install(monkeypatch)


async def arm(running, pool, **body):
    trainer = pool.trainer()
    trainer.order("open", group="g")
    port = (await trio.to_thread.run_sync(trainer.reply))["port"]
    place = {"master_address": "127.0.0.1", "master_port": port, "backend": "gloo"}
    assert (await running.ask(INIT, **place, rank_offset=1, world_size=2)).ok
    assert trainer.reply() == {"joined": True}
    prepared = await running.ask(PREPARE, **(body or {"num_buckets": 2, "buckets": BUCKETS}))
    assert prepared.ok, prepared.body
    return trainer


async def send(trainer, tensors):
    return await trio.to_thread.run_sync(lambda: trainer.tell("send", group="g", tensors=tensors))


async def test_a_bucket_is_prefetched_while_the_next_one_is_received(running, pool):
    engines = running.engines
    trainer = await arm(running, pool)
    await send(trainer, TENSORS[:1])
    for url in (A, B):
        await engines.read[url].wait()
        assert engines.untouched(url), "no tensor may change yet"
    assert DISK not in engines.paths(A)
    await send(trainer, TENSORS[1:])
    completed = await running.ask(COMPLETE, weight_version="v1")
    assert completed.ok, completed.body
    record = running.store.versions()[0].manifest
    for url in (A, B):
        first, *rest = engines.sizes(url)
        assert first == record.tensors["b"].offset
        assert rest in ([], [first + 30 * 2 * 2])
        tensors = dict(engines.targets[url])
        digests = {name: _digest(name, tensor) for name, tensor in tensors.items()}
        assert digests == {name: row.sha256 for name, row in record.tensors.items()}
    assert (await running.ask(DESTROY)).ok
    trainer.tell("destroy", group="g")


def _digest(name, tensor):
    from omni_proxy.process_group.broadcast.tensor_hashing import tensor_digest

    raw = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return tensor_digest(name, str(tensor.dtype), tensor.shape, raw)


async def test_a_failed_receive_keeps_the_old_version_and_the_next_sync_succeeds(running, pool):
    engines = running.engines
    trainer = await arm(running, pool)
    await send(trainer, TENSORS[:1])
    for url in (A, B):
        await engines.read[url].wait()
    trainer.kill()
    completed = await running.ask(COMPLETE, weight_version="v1")
    assert not completed.ok
    assert DISK not in engines.paths(A) + engines.paths(B)
    assert engines.untouched(A)
    assert engines.untouched(B)
    assert running.versions() == [("default", 0), ("default", 0)]
    await running.api.operations.sync.lifecycle.wait_settled()
    other = [["float32", [500], 7], ["bfloat16", [30, 2], 8]]
    trainer = await arm(running, pool)
    await send(trainer, other)
    assert (await running.ask(COMPLETE, weight_version="v2")).ok
    record = running.store.versions()[0].manifest
    for url in (A, B):
        held = {name: _digest(name, tensor) for name, tensor in engines.targets[url]}
        assert held == {name: row.sha256 for name, row in record.tensors.items()}
    assert (await running.ask(DESTROY)).ok
    trainer.tell("destroy", group="g")


@pytest.mark.parametrize("reads", [(B,)])
async def test_a_worker_without_the_prefetch_route_is_asked_only_once(running, pool):
    engines = running.engines
    trainer = await arm(running, pool)
    await send(trainer, TENSORS[:1])
    await engines.read[A].wait()
    await engines.read[B].wait()
    await send(trainer, TENSORS[1:])
    assert (await running.ask(COMPLETE, weight_version="v1")).ok
    assert engines.paths(A).count(PREFETCH_PATH) == 1
    assert not engines.untouched(A)
    assert (await running.ask(DESTROY)).ok
    trainer.tell("destroy", group="g")


async def test_buckets_that_are_announced_one_by_one_are_not_prefetched(running, pool):
    trainer = await arm(running, pool, **BUCKETS[0])
    await send(trainer, TENSORS[:1])
    assert (await running.ask(COMPLETE, flush_cache=True)).ok
    assert PREFETCH_PATH not in running.engines.paths(A)
    assert (await running.ask(DESTROY)).ok
    trainer.tell("destroy", group="g")


def test_bytes_are_final_up_to_the_end_of_the_last_complete_bucket():
    plans = parse_plans({"num_buckets": 2, "buckets": BUCKETS}, dense=True)
    incoming = IncomingVersion(None, FileRegion("f", (100, 2100)), plans)
    assert [incoming.final_bytes(completed) for completed in (0, 1, 2)] == [0, 2100, 2220]
