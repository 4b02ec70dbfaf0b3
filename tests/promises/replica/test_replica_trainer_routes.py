"""A replica implements vLLM's routes for trainers."""

import json

import httpx
import pytest
import trio

from tests.promises.support.replica_program import PATIENCE_SECS, healthy, started
from tests.promises.support.sync_trainer import expected_checksum

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")

PROMPT = list(range(20, 52))
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def replica():
    with started("--model", "tiny", "--dialect", "vllm", "--max-running", "32") as running:
        yield running


@pytest.fixture(scope="module")
def sglang_replica():
    with started("--model", "tiny") as running:
        yield running


@pytest.fixture
async def sglang_client(sglang_replica):
    with trio.fail_after(PATIENCE_SECS):
        async with sglang_replica.client() as client:
            await healthy(client)
            yield client


@pytest.fixture
async def trainer(trainers, client):
    trainer = trainers.one()
    yield trainer
    if trainer.living():
        await trainer.tell("leave_engines")


def tokens(count, **more):
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    return {"token_ids": PROMPT, "sampling_params": sampling, **more}


async def generated(client, count=24):
    response = await client.post(GENERATE, json=tokens(count))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def versions_of(choice):
    return [span["version"] for span in choice["weight_versions"]]


async def checksum(client):
    from omni_proxy.process_group.broadcast.tensor_hashing import roll_up

    body = (await client.post("/weight_checker", json={"action": "checksum"})).json()
    return roll_up({name.split(":")[-1]: value for name, value in body["checksums"].items()})


async def version(client):
    return (await client.get("/weight_info")).json()["weight_version"]


async def events(response):
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@pytest.mark.parametrize(
    "options",
    [
        {"pause_mode": "keep"},
        {"pause_mode": "wait", "chunks": 3},
        {"pause_mode": "abort", "packed_bytes": 100_000},
        {"pause_mode": None, "chunks": 2, "packed_bytes": 1 << 30},
    ],
    ids=str,
)
async def test_the_replica_has_the_weights_that_a_trainer_sends(client, trainer, replica, options):
    for seed in (1, 2):
        label = f"{options}-{seed}"
        done = await trainer.tell("transfer", url=replica.url, seed=seed, version=label, **options)
        assert done["why"] == "", done
        inits = [path for path, _ in done["calls"] if path == "/init_weight_transfer_engine"]
        assert len(inits) == (seed == 1)  # all transfers share one group
        assert await checksum(client) == expected_checksum(seed)
        assert await version(client) == label
        assert (await client.get("/is_paused")).json() == {"is_paused": False}


async def test_each_token_comes_from_the_weight_version_that_is_reported(client, trainer, replica):
    choices, ended = [], trio.Event()

    async def ask():
        while not ended.is_set():
            choices.append(await generated(client))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(ask)
        for number in range(6):
            done = await trainer.tell(
                "transfer", url=replica.url, seed=3 + number % 2, version=f"t{number % 2}",
                pause_mode="keep", chunks=3,
            )  # fmt: skip
            assert done["why"] == "", done
            before = len(choices)
            while not any(versions_of(choice) == [f"t{number % 2}"] for choice in choices[before:]):
                await trio.sleep(0.01)
        ended.set()
    tokens_of_version = {}
    for seed, label in ((3, "t0"), (4, "t1")):
        done = await trainer.tell(
            "transfer", url=replica.url, seed=seed, version=label, pause_mode="keep", chunks=3
        )
        assert done["why"] == ""
        tokens_of_version[label] = (await generated(client))["token_ids"]
    assert tokens_of_version["t0"] != tokens_of_version["t1"]
    for choice in choices:
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(choice["token_ids"]) == 24
        first = spans[0]
        if first["version"] in tokens_of_version:
            assert (
                choice["token_ids"][: first["end"]]
                == tokens_of_version[first["version"]][: first["end"]]
            )
    assert ["t0", "t1"] in map(versions_of, choices) or ["t1", "t0"] in map(versions_of, choices)


async def test_a_trainer_that_dies_changes_nothing_and_the_next_one_succeeds(
    client, trainers, trainer, replica
):
    await trainer.tell("transfer", url=replica.url, seed=5, version="five", pause_mode=None)
    dying = {"url": replica.url, "seed": 6, "version": "never", "chunks": 3, "dies": True}
    assert await trainers.one().tell("transfer", **dying) == {"gone": True}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    # An update is open already.
    assert (await client.post("/start_weight_update")).status_code == 500
    assert await checksum(client) == expected_checksum(5)
    assert await version(client) == "five"
    again = await trainers.one().tell(
        "transfer", url=replica.url, seed=6, version="six", pause_mode="keep"
    )
    assert again["why"] == "", again
    assert await checksum(client) == expected_checksum(6)


async def test_a_trainer_with_a_bare_nccl_communicator_is_rejected_at_once(client, trainers):
    trainer = trainers.one()
    port = (await trainer.tell("bare_store", nccl=True))["port"]
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    response = await client.post("/init_weight_transfer_engine", json={"init_info": info})
    trainer.kill()
    assert response.status_code == 500
    assert "a bare NCCL communicator" in response.json()["error"]["message"]


async def test_keep_freezes_requests_and_resume_continues_them(client):
    uninterrupted = await generated(client, 60)
    async with client.stream("POST", GENERATE, json=tokens(60, stream=True)) as streamed:
        stream_events = events(streamed)
        first = await anext(stream_events)
        assert (await client.post("/pause?mode=keep")).json() == {"status": "paused"}
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert (await client.post("/resume")).json() == {"status": "resumed"}
        rest = [event async for event in stream_events]
    assert rest.pop() == "[DONE]"
    ids = [token for event in (first, *rest) for token in event["choices"][0]["token_ids"]]
    assert ids == uninterrupted["token_ids"]


async def test_wait_finishes_running_requests_and_holds_new_ones(client):
    finished = []

    async def ask(name, count):
        finished.append((name, (await generated(client, count))["finish_reason"]))

    async with trio.open_nursery() as nursery:
        async with client.stream("POST", GENERATE, json=tokens(80, stream=True)) as streamed:
            stream_events = events(streamed)
            await anext(stream_events)
            assert (await client.post("/pause?mode=wait")).status_code == 200
            nursery.start_soon(ask, "later", 4)
            finish_reason = [event async for event in stream_events][-2]["choices"][0][
                "finish_reason"
            ]
            assert finish_reason == "length"
        while (await client.get("/load")).json() != {"server_load": 1}:
            await trio.sleep(0.01)
        assert finished == []
        await client.post("/resume")
    assert finished == [("later", "length")]


async def test_an_abort_ends_one_request_with_its_tokens_so_far_and_no_other(client):
    results = {}

    async def ask(name, count):
        body = tokens(count, request_id=name)
        results[name] = (await client.post(GENERATE, json=body)).json()["choices"][0]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "one", 4000)
        nursery.start_soon(ask, "two", 200)
        while (await client.get("/load")).json() != {"server_load": 2}:
            await trio.sleep(0.01)
        body = {"request_ids": ["one"]}
        assert (await client.post("/abort_requests", json=body)).json() == {
            "status": "aborted", "aborted": 1,
        }  # fmt: skip
    assert results["one"]["finish_reason"] == "abort"
    assert len(results["one"]["token_ids"]) < 4000
    assert (results["two"]["finish_reason"], len(results["two"]["token_ids"])) == ("length", 200)


async def test_a_pause_with_abort_ends_all_requests_while_it_is_paused(client):
    choices = []

    async def ask():
        choices.append(await generated(client, 3000))

    async with trio.open_nursery() as nursery:
        for _ in range(40):  # more than can run at the same time
            nursery.start_soon(ask)
        while (await client.get("/load")).json() != {"server_load": 40}:
            await trio.sleep(0.01)
        assert (await client.post("/pause")).json() == {"status": "paused"}
    assert {choice["finish_reason"] for choice in choices} == {"abort"}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    await client.post("/resume")
    assert (await generated(client, 3))["finish_reason"] == "length"


async def test_the_abort_route_of_sglang_takes_a_rid_or_a_prefix_or_all(sglang_client):
    results = {}

    async def ask(rid):
        body = {
            "input_ids": [PROMPT], "rid": rid,
            "sampling_params": {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True},
        }  # fmt: skip
        result = (await sglang_client.post("/generate", json=body)).json()[0]
        results[rid] = result["meta_info"]["finish_reason"]["type"]

    async def until_live(count):
        while (await sglang_client.get("/health")).json()["pending_completions"] != count:
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        for rid in ("a::1", "a::2", "b::1", "c"):
            nursery.start_soon(ask, rid)
        await until_live(4)
        assert (await sglang_client.post("/abort_request", json={"rid": "c"})).status_code == 200
        await until_live(3)
        while not results:  # the response may not have arrived yet
            await trio.sleep(0.01)
        assert results == {"c": "abort"}
        assert (await sglang_client.post("/abort_request", json={"rid": "a"})).status_code == 200
        assert (
            await sglang_client.post("/abort_request", json={"rid": "a::", "prefix": True})
        ).is_success
        await until_live(1)
        while len(results) < 3:
            await trio.sleep(0.01)
        assert results == {"c": "abort", "a::1": "abort", "a::2": "abort"}
        assert (await sglang_client.post("/abort_request", json={"abort_all": True})).is_success
    assert set(results.values()) == {"abort"}
    assert (await sglang_client.post("/abort_request", json={})).status_code == 400


async def test_sleep_holds_requests_until_wake_up(client):
    asleep = await client.post("/sleep?level=1&mode=keep")
    assert asleep.json() == {"status": "sleeping", "level": 1}
    with trio.move_on_after(0.2) as held:
        await generated(client, 2)
    assert held.cancelled_caught
    half = await client.post("/wake_up?tags=weights")
    assert half.json() == {"status": "sleeping", "tags": ["weights"]}
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await client.post("/wake_up?tags=kv_cache")).json()["status"] == "awake"
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert (await generated(client, 2))["finish_reason"] == "length"


async def test_weights_are_reloaded_from_a_file_and_reset_at_random(client, tmp_path):
    from safetensors.torch import save_file

    from omni_proxy.replica.models import tiny

    file = tmp_path / "model.safetensors"
    named = dict(tiny.build(9).named_parameters())
    save_file({name: tensor.detach().clone() for name, tensor in named.items()}, file)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(file)}}
    assert (await client.post("/collective_rpc", json=reload)).json() == {"results": [None]}
    body = (await client.post("/weight_checker", json={"action": "checksum"})).json()
    assert await checksum(client) == expected_checksum(9)
    await client.post("/weight_checker", json={"action": "reset"})
    compare = {"action": "compare", "baseline": body["checksums"]}
    unlike = (await client.post("/weight_checker", json=compare)).json()
    assert unlike["match"] is False
    assert len(unlike["mismatches"]) == len(body["checksums"])
    await client.post("/collective_rpc", json=reload)
    alike = (await client.post("/weight_checker", json=compare)).json()
    assert alike == {"match": True, "mismatches": []}


def test_a_replica_with_the_vllm_dialect_has_no_routes_of_sglang(replica):
    with httpx.Client(base_url=replica.url, verify=False) as client:
        for path in ("/model_info", "/server_info", "/pause_generation", "/generate"):
            assert client.get(path).status_code in (404, 405), path
            assert client.post(path, json={}).status_code in (404, 405), path
