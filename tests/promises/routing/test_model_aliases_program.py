"""Aliases and adapters in the whole program, with real replicas and several processes."""

import json
from collections import Counter

import pytest
import trio

from tests.promises.support.fakes import counted, fake_workers
from tests.promises.support.fleet_program import program, put
from tests.promises.support.tiny_fleet import CHAT, known, replicas

PROBES = "[health]\ninterval_secs = 0.3\nsuccess_threshold = 1\n"


def worker(url, model, more=""):
    return f'[[workers]]\nurl = "{url}"\nmodel = "{model}"\n{more}\n'


def alias(first, second):
    return (
        '[[routing.models]]\nname = "alias"\ntargets = ['
        f'{{ model = "one", weight = {first} }}, {{ model = "two", weight = {second} }}]\n'
    )


async def test_a_split_sends_each_real_replica_its_own_model_name(tmp_path):
    for name in ("torch", "tiktoken"):
        pytest.importorskip(name)
    file = tmp_path / "proxy.toml"
    async with (
        replicas(1, "--model-name", "one") as (one,),
        replicas(1, "--model-name", "two") as (two,),
    ):
        workers = worker(one.url, "one") + worker(two.url, "two")
        put(file, f"[server]\nport = 0\n{PROBES}{alias(3, 1)}{workers}")
        async with program("--config", file) as running:
            await known(running, 2)
            served_models = Counter()
            for _ in range(8):
                response = await running.client.post(
                    "/v1/chat/completions", json=CHAT | {"model": "alias"}
                )
                assert response.status_code == 200, response.text
                worker_header = response.headers["x-sglang-omni-worker"]
                served_models[response.json()["model"]] += 1
                assert (response.json()["model"] == "one") == (
                    one.url.rpartition(":")[2] in worker_header
                )
            assert served_models == {"one": 6, "two": 2}
            cards = (await running.get_json("/v1/models"))["data"]
            assert {card["id"] for card in cards} == {"one", "two", "alias"}
            assert (await running.get_json("/v1/models/alias"))["root"] == "one"
            await one.kill()
            response = await running.client.post(
                "/v1/chat/completions", json=CHAT | {"model": "alias"}
            )
            assert response.json()["model"] == "two"


async def test_every_process_has_the_aliases_and_the_adapters_of_engines(tmp_path):
    file = tmp_path / "proxy.toml"
    adapters = {"names": ["first"]}

    async def engine(call):
        if call.line.startswith("GET /v1/models"):
            cards = [{"id": "one", "parent": None}]
            cards += [{"id": name, "parent": "one"} for name in adapters["names"]]
            await call.send(counted(json.dumps({"object": "list", "data": cards}).encode()))
        elif "lora_adapter" in call.line:
            adapters["names"].append(json.loads(call.body)["lora_name"])
            await call.send(counted(b'"ok"'))
        else:
            await call.send(counted(call.body))

    async with fake_workers(engine, engine) as (one, two):
        workers = worker(one.url, "one", 'loras = "auto"') + worker(two.url, "two")
        head = f"[server]\nport = 0\nprocesses = 2\n{PROBES}"
        put(file, head + alias(1, 1) + workers)
        async with program("--config", file) as running:
            # Any process may accept the next request.
            running.client.headers["connection"] = "close"

            async def model_at(name):
                response = await running.client.post("/v1/chat/completions", json={"model": name})
                worker_header = response.headers.get("x-sglang-omni-worker", "")
                return (
                    response.status_code,
                    response.json().get("model"),
                    worker_header.rpartition("%3A")[2],
                )

            await running.until("/workers", lambda body: body["routable_workers"] == 2)
            first = one.url.rpartition(":")[2]
            with trio.fail_after(60):
                while (await model_at("first"))[0] != 200:
                    await trio.sleep(0.05)
            for _ in range(12):
                assert await model_at("first") == (200, "first", first)
            assert (await model_at("second"))[0] == 503
            loaded = await running.client.post(
                "/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": "/l"}
            )
            assert loaded.status_code == 200, loaded.text
            for _ in range(12):
                assert await model_at("second") == (200, "second", first)
            assert {(await model_at("alias"))[1] for _ in range(16)} == {"one", "two"}
            put(file, head + alias(1, 1).replace("alias", "renamed") + workers)
            await running.client.post("/reload")
            for _ in range(8):
                status, model, _ = await model_at("renamed")
                assert (status, model in ("one", "two")) == (200, True)
                assert (await model_at("alias"))[0] == 503
            line = 'omni_proxy_model_alias_requests_total{alias="renamed",target="one"}'
            with trio.fail_after(60):  # processes send their counts every quarter second
                while line not in (await running.client.get("/metrics")).text:
                    await trio.sleep(0.05)
