"""Two-phase updates over HTTP, with a real trainer and real process groups."""

from functools import partial

import pytest
import trio

from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.torch_engine import with_weight_params
from tests.replica.api.api_fixture import MESSAGES, opened
from tests.replica.api.sglang.test_weight_routes import (
    checksum,
    checksum_of,
    decode_of,
    status_and_body,
    weights_of,
)
from tests.replica.weights.sync_steps import (
    BODY,
    DOWN,
    NORM,
    UP,
    bucket_of,
    expected_values,
    multi_bucket,
    single_bucket,
)

INIT, PREPARE = "/init_weights_update_group", "/prepare_weights_update"
COMPLETE, DESTROY = "/complete_weights_update", "/destroy_weights_update_group"
A, B = bucket_of([UP, NORM]), bucket_of([DOWN], seed=7)


@pytest.fixture
async def tiny():
    params = {"weights_isolation": "thread"}
    async with opened(
        with_weight_params(builtin_pipeline(BuiltinOptions(model="tiny")), params)
    ) as api:
        yield api


class Trainer:
    """Calls the replica's HTTP API, and broadcasts to its ranks over gloo."""

    def __init__(self, api, side):
        self.api, self.side = api, side

    async def post(self, path, body):
        return await status_and_body(await self.api.post(path, body))

    async def join(self, **more):
        port = (await self.ask("open", group="g"))["port"]
        rendezvous = {
            "master_address": "127.0.0.1",
            "master_port": str(port),
            "world_size": 2,
            "rank_offset": 1,
            "group_name": "g",
            "backend": "gloo",
        }
        status, body = await self.post(INIT, rendezvous | more)
        assert (status, body["success"]) == (200, True), body
        assert await trio.to_thread.run_sync(self.side.reply) == {"joined": True}

    async def ask(self, do, **order):
        return await trio.to_thread.run_sync(partial(self.side.tell, do, **order))

    async def send(self, bucket):
        tensors = [(dtype, shape, seed) for _, dtype, shape, seed in bucket]
        assert "sent" in await self.ask("send", group="g", tensors=tensors)

    async def leave(self):
        status, _ = await self.post(DESTROY, BODY)
        assert status == 200
        await self.ask("destroy", group="g")


@pytest.fixture
async def trainer(tiny, pool):
    with trio.fail_after(30):
        trainer = Trainer(tiny, pool.trainer())
        await trainer.join()
        yield trainer
        if trainer.side.living():
            await trainer.ask("destroy", group="g")


async def sync_of(api):
    return (await (await api.get("/model_info")).get_json())["weight_sync"]


async def test_an_update_in_two_phases_with_several_buckets(tiny, trainer):
    status, body = await trainer.post(PREPARE, multi_bucket(A, B, an_unknown_field=1))
    assert (status, body["status"], body["success"]) == (200, "ready", True)
    assert body["message"] == "ready for 3 tensors, 393728 bytes, in 2 buckets"
    assert list(body)[:5] == ["op_id", "action", "success", "message", "results"]
    for info in (await sync_of(tiny), await status_and_body(await tiny.get("/server_info"))):
        sync = info[1]["weight_sync"] if isinstance(info, tuple) else info
        assert (sync["state"], sync["group_name"]) == ("receiving", "g")
    await trainer.send(A)
    await trainer.send(B)
    status, body = await trainer.post(COMPLETE, BODY | {"weight_version": "v1"})
    assert status == 200
    top_level = {
        "success": True,
        "status": "ok",
        "num_buckets_received": 2,
        "message": "Succeeded to update parameter online.",
        "weight_version": "v1",
        "weights": "whole",
        "cache_epoch": 1,
    }
    assert top_level.items() <= body.items()
    assert decode_of(body)["data"]["flush_cache"] is False
    assert await checksum(tiny) == checksum_of(weights_of(0) | expected_values(A, B))
    await trainer.leave()
    assert (await sync_of(tiny))["state"] == "idle"


async def test_an_update_with_one_bucket_at_a_time(tiny, trainer):
    for bucket, version in ((A, None), (B, "v2")):
        status, body = await trainer.post(PREPARE, single_bucket(bucket))
        assert (status, body["status"]) == (200, "ready")
        await trainer.send(bucket)
        last = {"weight_version": version, "flush_cache": version is not None}
        status, body = await trainer.post(
            COMPLETE, BODY | last | {"transport": "nccl_broadcast", "session_id": None}
        )
        assert (status, body["num_buckets_received"]) == (200, 1)
        assert body["weights"] == ("open" if version is None else "whole")
    assert await checksum(tiny) == checksum_of(weights_of(0) | expected_values(A, B))
    assert body["weight_version"] == "v2"


async def test_other_requests_are_served_while_a_completion_waits(tiny, trainer):
    await trainer.post(PREPARE, multi_bucket(A))
    results = []

    async def complete():
        results.append(await trainer.post(COMPLETE, BODY | {"weight_version": "v3"}))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete)
        checksum_during_update = await checksum(tiny)
        assert checksum_during_update == checksum_of(weights_of(0))
        assert (await tiny.get("/health")).status_code == 200
        for path in ("/pause_generation", "/continue_generation", "/flush_cache"):
            assert (await tiny.post(path, {})).status_code == 200
        chat = {"messages": MESSAGES, "temperature": 0, "max_tokens": 4}
        assert (await tiny.post("/v1/chat/completions", chat)).status_code == 200
        status, body = await trainer.post(COMPLETE, BODY)
        assert (status, body["success"], body["status"]) == (409, False, "error")
        assert "already being completed" in body["message"]
        assert results == []
        await trainer.send(A)
    assert results[0][1]["weight_version"] == "v3"


async def test_a_waiting_completion_fails_if_its_group_is_destroyed(tiny, trainer):
    await trainer.post(PREPARE, multi_bucket(A))
    results = []

    async def complete():
        results.append(await trainer.post(COMPLETE, BODY))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete)
        await checksum(tiny)
        await trainer.leave()
    status, body = results[0]
    assert (status, body["success"], body["status"]) == (400, False, "error")
    assert "was destroyed" in body["message"]
    assert (await sync_of(tiny))["state"] == "idle"
    await trainer.join()
    assert (await trainer.post(PREPARE, multi_bucket(B)))[0] == 200


async def test_the_callers_timeout_ends_the_wait_and_fails_the_update(tiny, trainer):
    await trainer.post(PREPARE, multi_bucket(A))
    status, body = await trainer.post(COMPLETE, BODY | {"timeout_s": 0.2})
    assert (status, body["success"]) == (400, False)
    assert "not complete within 0.2 s" in body["message"]
    assert (await sync_of(tiny))["state"] == "failed"


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        (COMPLETE, {}, 400, "no weights update is prepared"),
        (PREPARE, {}, 400, "nothing is announced"),
        (PREPARE, {"names": [NORM], "dtypes": [], "shapes": []}, 400, "must have the same length"),
        (PREPARE, {"names": "x", "dtypes": [], "shapes": []}, 400, "names must be a list"),
        (PREPARE, single_bucket(A) | {"group_name": "x"}, 400, "group 'x' is not initialized"),
        (PREPARE, multi_bucket(A, transport="p2p"), 400, "transport 'p2p'"),
        (PREPARE, multi_bucket(A, num_buckets="two"), 400, "num_buckets must be an integer"),
        (PREPARE, multi_bucket(A, timeout_s=0), 400, "timeout 0.0: it must be a positive number"),
        (PREPARE, multi_bucket(A, timeout_s=-1e9), 400, "it must be a positive number of seconds"),
        (PREPARE, multi_bucket(A, timeout_s="soon"), 422, "timeout_s"),
        (PREPARE, [], 422, "body"),
        (PREPARE, b"{", 422, "JSON"),
    ],
)
async def test_a_refusals_status_code_and_body_agree(tiny, path, body, status, reason):
    received_status, reply = await status_and_body(await tiny.post(path, body))
    assert (received_status, reply["success"], reply["status"]) == (status, False, "error")
    assert reason in reply["message"]


async def test_a_second_preparation_or_trainer_is_a_conflict(tiny, trainer):
    assert (await trainer.post(PREPARE, multi_bucket(A)))[0] == 200
    status, body = await trainer.post(PREPARE, multi_bucket(A))
    assert (status, body["success"]) == (409, False)
    assert "already" in body["message"]
    rendezvous = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
    status, body = await trainer.post(INIT, rendezvous | BODY | {"rank_offset": 1})
    assert (status, body["success"]) == (409, False)
    assert "already" in body["message"]
    assert "127.0.0.1:" in body["message"]
    await trainer.send(A)
    assert (await trainer.post(COMPLETE, BODY))[0] == 200
