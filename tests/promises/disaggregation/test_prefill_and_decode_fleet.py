"""A client, the proxy, and replicas for prefill and decode, each as a process."""

import os
import re
import signal

import pytest
import trio

from tests.ports import free_run
from tests.promises.support.fleet_program import PATIENCE_SECS, PROBES, program, starting
from tests.promises.support.replica_program import healthy, started
from tests.promises.support.tiny_fleet import weights_in

TEXT = "The sea is wide and the wind is cold. " * 12
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": TEXT}],
    "temperature": 0,
    "max_tokens": 16,
}
GENERATE = {
    "text": TEXT,
    "sampling_params": {"temperature": 0.8, "sampling_seed": 3, "max_new_tokens": 16},
}
BATCH = {"model": "tiny", "prompt": [TEXT, "short", "the wind"], "temperature": 0, "max_tokens": 8}
ROUTES = {
    "sglang": [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/chat/completions", CHAT | {"n": 2, "temperature": 1.0, "seed": 4}),
        ("/generate", GENERATE),
        ("/generate", GENERATE | {"stream": True}),
        ("/v1/completions", BATCH),
    ],
    "nixl": [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/chat/completions", CHAT | {"n": 2, "temperature": 1.0, "seed": 4}),
        ("/v1/completions", BATCH | {"prompt": TEXT, "stream": True}),
        ("/v1/completions", BATCH),
        ("/v1/responses", {"input": TEXT, "temperature": 0, "max_output_tokens": 8}),
        ("/v1/messages", {k: CHAT[k] for k in ("model", "messages")} | {"max_tokens": 8, "top_k": 1}),
    ],
}  # fmt: skip
ROUTES["mooncake"] = ROUTES["nixl"][:3]
VARYING = re.compile(
    r'"(id|request_id|created|created_at|item_id|e2e_latency|cached_tokens)": ?[^,}]*'
)


def essence(response) -> str:
    """Returns the body without ids, times and cached tokens, which differ between requests."""
    return VARYING.sub("", response.text)


def fleet(connector, base_port) -> str:
    """Returns a configuration with one prefill and two decode replicas."""
    group = (
        '[[launch]]\nname = "{role}"\nrole = "{role}"\nreplicas = {count}\nbase_port = {port}\n'
        'kv_connector = "{connector}"\nbase_bootstrap_port = {bootstrap}\nmodel = "tiny"\n'
        'command = ["omni-proxy", "replica", "--model", "tiny", "--role", "{role}", '
        '"--kv-connector", "{connector}", "--host", "{{host}}", "--port", "{{port}}", '
        '"--bootstrap-port", "{{bootstrap_port}}"]\n'
        'capabilities = ["chat", "streaming"]\n'
    )
    ports = {"bootstrap": base_port + 3, "connector": connector}
    prefill = group.format(role="prefill", count=1, port=base_port, **ports)
    return (
        f'[server]\nport = 0\nqueue_size = 100\n[routing]\npolicy = "least_request"\n{PROBES}'
        + prefill
        + group.format(role="decode", count=2, port=base_port + 1, **ports)
    )


async def until_ready(running) -> dict[str, list[int]]:
    """Returns the process ids of each role."""
    body = await running.until(
        "/status", lambda body: body["fleet"]["routable_workers"] == 3 == len(body["launch"])
    )
    pids: dict[str, list[int]] = {}
    for place in body["launch"]:
        pids.setdefault(place["name"], []).append(place["pid"])
    return pids


async def until_idle(running):
    await running.until(
        "/workers", lambda body: not any(worker["in_flight"] for worker in body["workers"])
    )


@pytest.mark.parametrize("connector", ROUTES)
async def test_launched_prefill_and_decode_replicas_answer_as_one(connector):
    port = free_run(7)
    arguments = ["--worker-base-port", str(port), "--bootstrap-base-port", str(port + 4)]
    arguments += ["--port", str(port + 6), "--kv-connector", connector, "--model-path", "tiny"]
    async with starting("launch", "--prefill", "1", "--decode", "2", *arguments) as running:
        with started("--model", "tiny") as whole:
            await running.until_logged(r"serving on http://127.0.0.1:")
            await running.arrive()
            stats = (await running.get_json("/workers"))["stats"]
            assert (stats["prefill_count"], stats["decode_count"]) == (1, 2)
            async with whole.client() as client:
                await healthy(client)
                for path, body in ROUTES[connector]:
                    response = await running.client.post(path, json=body)
                    assert response.status_code == 200, response.text
                    assert essence(response) == essence(await client.post(path, json=body))
            await until_idle(running)
            text = (await running.client.get("/metrics")).text
    assert "omni_proxy_leg_seconds" in text
    assert not re.search(r"^omni_proxy_kv_transfer_failures_total\S* [1-9]", text, re.MULTILINE)


@pytest.mark.parametrize("connector", ["sglang", "nixl"])
async def test_a_killed_worker_of_either_pool_is_replaced_and_leaves_nothing_in_flight(
    tmp_path, connector
):
    file = tmp_path / "proxy.toml"
    file.write_text(fleet(connector, free_run(4)))
    async with program("--config", file) as running:
        pids = await until_ready(running)
        expected = essence(await running.client.post("/v1/chat/completions", json=CHAT))
        for role in ("prefill", "decode"):
            responses, killed = [], trio.Event()

            async def ask(responses=responses, killed=killed):
                while not killed.is_set():
                    response = await running.client.post("/v1/chat/completions", json=CHAT)
                    responses.append(response)

            with trio.fail_after(PATIENCE_SECS):
                async with trio.open_nursery() as nursery:
                    for _ in range(12):
                        nursery.start_soon(ask)
                    while len(responses) < 12:
                        await trio.sleep(0.001)
                    before = list(responses)
                    os.kill(pids[role][0], signal.SIGKILL)
                    killed.set()
            assert [response.status_code for response in before] == [200] * len(before)
            # Each request succeeds or fails with an error; none waits for a timeout of an engine.
            for response in responses:
                assert response.status_code != 200 or essence(response) == expected
                # A local reply, or the engine's reply, whose `detail` names the transfer.
                if response.status_code != 200 and "error" not in response.json():
                    assert "KVTransferError" in response.json()["detail"]
            await until_idle(running)
            pids = await until_ready(running)
            again = await running.client.post("/v1/chat/completions", json=CHAT)
            assert (again.status_code, essence(again)) == (200, expected)


async def test_new_weights_go_to_both_pools_and_no_request_mixes_versions(tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text(fleet("sglang", free_run(4)) + "[weight_sync]\ndrain_secs = 60\n")
    update = {"model_path": weights_in(tmp_path).path, "weight_version": "v2"}
    texts = {}
    with started("--model", "tiny") as whole:
        async with whole.client() as client:
            await healthy(client)
            texts["default"] = (await client.post("/generate", json=GENERATE)).json()["text"]
            assert (await client.post("/update_weights_from_disk", json=update)).is_success
            texts["v2"] = (await client.post("/generate", json=GENERATE)).json()["text"]
    assert texts["default"] != texts["v2"]
    async with program("--config", file) as running:
        await until_ready(running)
        versions, done = [], trio.Event()

        async def ask():
            while not done.is_set():
                response = await running.client.post("/generate", json=GENERATE)
                assert response.status_code == 200, response.text
                version = response.json()["meta_info"]["weight_version"]
                assert response.json()["text"] == texts[version]
                versions.append(version)

        with trio.fail_after(PATIENCE_SECS):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask)
                while not versions:
                    await trio.sleep(0.001)
                response = await running.client.post("/update_weights_from_disk", json=update)
                assert response.status_code == 200, response.text
                updated = len(versions)
                while len(versions) < updated + 6:
                    await trio.sleep(0.001)
                done.set()
        assert (versions[0], versions[-1]) == ("default", "v2")
        workers = (await running.get_json("/workers"))["workers"]
        assert sorted((each["role"], each["weight_version"]) for each in workers) == [
            ("decode", "v2"), ("decode", "v2"), ("prefill", "v2"),
        ]  # fmt: skip


async def test_an_abort_by_the_clients_rid_ends_both_legs(tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text(fleet("sglang", free_run(4)))
    body = GENERATE | {"rid": "mine", "sampling_params": {"max_new_tokens": 6000}}
    async with program("--config", file) as running:
        await until_ready(running)
        responses = []

        async def ask():
            responses.append(await running.client.post("/generate", json=body))

        with trio.fail_after(PATIENCE_SECS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await running.until(
                    "/workers",
                    lambda body: any(
                        worker["in_flight"]
                        for worker in body["workers"]
                        if worker["role"] == "decode"
                    ),
                )
                while not responses:  # engines return 404 until they know the id
                    await running.client.post("/abort_request", json={"rid": "mine"})
                    await trio.sleep(0.05)
        meta = responses[0].json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["id"] == "mine"
        await until_idle(running)
