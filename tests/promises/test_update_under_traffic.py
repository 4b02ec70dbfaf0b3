"""New weights from a file on two real replicas, while clients go on asking."""

import json
import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio

from tests.promises.fleet_program import program

torch = pytest.importorskip("torch")
pytest.importorskip("tiktoken")
safetensors = pytest.importorskip("safetensors.torch")

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
UPDATE = "/update_weights_from_disk"


@pytest.fixture(autouse=True)
async def soon():
    with trio.fail_after(120):
        yield


@pytest.fixture
def new_weights(tmp_path):
    """A file of other weights, and the checksum of a rank that holds them."""
    from omni_proxy.replica.models import tiny
    from omni_proxy.weights.checksum import roll_up, tensor_digest

    tensors = {name: each.detach().clone() for name, each in tiny.build(7).named_parameters()}
    safetensors.save_file(tensors, tmp_path / "new.safetensors")
    digests = {
        name: tensor_digest(name, str(each.dtype), each.shape, each.numpy().tobytes())
        for name, each in tensors.items()
    }
    return SimpleNamespace(path=str(tmp_path / "new.safetensors"), checksum=roll_up(digests))


@asynccontextmanager
async def replicas(count):
    made = []
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        for _ in range(count):
            with socket.create_server(("127.0.0.1", 0)) as trial:
                port = trial.getsockname()[1]
            words = ["replica", "--model", "tiny", "--threads", "1", "--port", str(port)]
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "omni_proxy", *words], stderr=subprocess.DEVNULL, env=env
            )
            made.append(SimpleNamespace(process=process, url=f"http://127.0.0.1:{port}"))
        yield made
    finally:
        for each in made:
            each.process.kill()
        with trio.CancelScope(shield=True):
            for each in made:
                await each.process.wait()


def toml(fleet, weight_sync):
    entries = "".join(f'[[workers]]\nurl = "{each.url}"\n' for each in fleet)
    return (
        "[server]\nport = 0\nqueue_size = 50\n[health]\ninterval_secs = 0.3\n"
        f"on_threshold = 'unhealthy'\n[weight_sync]\n{weight_sync}\n{entries}"
    )


async def test_with_time_to_drain_no_client_sees_it_and_every_answer_is_of_one_version(
    tmp_path, new_weights
):
    file = tmp_path / "proxy.toml"
    answers = []
    async with replicas(2) as both:
        file.write_text(toml(both, "drain_secs = 30"))
        async with program("--config", file) as running:
            await running.until("/workers", lambda told: told["routable_workers"] == 2)
            await running.until(
                "/weights", lambda told: all(row["weight_version"] for row in told["workers"])
            )
            over = trio.Event()

            async def ask():
                while not over.is_set():
                    answers.append(await running.client.post("/v1/chat/completions", json=CHAT))

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask)
                while len(answers) < 6:
                    await trio.sleep(0.02)
                body = {"model_path": new_weights.path, "weight_version": "v2"}
                updated = await running.client.post(UPDATE, json=body)
                already = len(answers)
                while len(answers) < already + 6:
                    await trio.sleep(0.02)
                over.set()
            told = updated.json()
            assert (updated.status_code, told["weight_epoch"]) == (200, 1), told
            sums = told["verification"]["checksums"]
            assert sums == {each.url: new_weights.checksum for each in both}
            assert {answer.status_code for answer in answers} == {200}
            spanning = [a.headers for a in answers if "x-omni-weight-version-end" in a.headers]
            assert not spanning
            texts = {}
            for answer in answers:
                text = answer.json()["choices"][0]["message"]["content"]
                texts.setdefault(answer.headers["x-omni-weight-version"], set()).add(text)
            assert sorted(texts) == ["default", "v2"]
            assert [len(found) for found in texts.values()] == [1, 1]
            assert texts["default"] != texts["v2"]


async def test_a_replica_that_is_killed_in_the_middle_is_out_and_the_next_update_works(
    tmp_path, new_weights
):
    file = tmp_path / "proxy.toml"
    body = {"model_path": new_weights.path, "weight_version": "v2"}
    async with replicas(2) as (survivor, victim):
        file.write_text(toml([survivor, victim], ""))
        async with program("--config", file) as running:
            await running.until("/workers", lambda told: told["routable_workers"] == 2)
            # Stopped, it takes the call and never answers: so it dies in the middle for sure.
            victim.process.send_signal(19)
            answers = []

            async def update():
                answers.append(await running.client.post(UPDATE, json=body))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(update)

                def one_is_done(told):
                    rows = (told["operation"] or {}).get("workers", [])
                    return [row["progress"] for row in rows] == ["done", "asked"]

                await running.until("/weights", one_is_done)
                victim.process.kill()
            told = answers[0].json()
            assert answers[0].status_code == 502
            assert [each["standing"] for each in told["results"]] == ["restored", "uncertain"]
            chat = await running.client.post("/v1/chat/completions", json=CHAT)
            assert (chat.status_code, chat.headers["x-omni-weight-version"]) == (200, "v2")
            name = told["results"][1]["worker"].replace("/", "%2F")
            gone = await running.client.put(f"/workers/{name}", json={"is_dead": True})
            assert gone.status_code == 200, json.dumps(gone.json())
            again = await running.client.post(UPDATE, json={**body, "weight_version": "v3"})
            assert (again.status_code, again.json()["worker_count"]) == (200, 1)
