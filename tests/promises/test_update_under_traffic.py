"""New weights from a file on two real replicas, under traffic."""

import json

import pytest
import trio

from tests.promises.fleet_program import program, record
from tests.promises.tiny_fleet import CHAT, UPDATE, known, replicas, toml

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("soon")


async def test_with_a_drain_no_client_notices_and_every_response_is_of_one_version(
    tmp_path, new_weights
):
    file = tmp_path / "proxy.toml"
    answers = []
    async with replicas(2) as both:
        file.write_text(toml(both, "drain_secs = 30"))
        async with program("--config", file) as running:
            await known(running, 2)
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
            reported = updated.json()
            assert (updated.status_code, reported["weight_epoch"]) == (200, 1), reported
            sums = reported["verification"]["checksums"]
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


async def test_a_replica_killed_during_an_update_is_held_and_the_next_update_works(
    tmp_path, new_weights
):
    file = tmp_path / "proxy.toml"
    body = {"model_path": new_weights.path, "weight_version": "v2"}
    async with replicas(2) as (survivor, victim):
        file.write_text(toml([survivor, victim], ""))
        async with program("--config", file) as running:
            await running.until("/workers", lambda body: body["routable_workers"] == 2)
            # A stopped process takes the call and never answers, so it surely dies during the call.
            victim.stop()
            answers = []

            async def update():
                answers.append(await running.client.post(UPDATE, json=body))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(update)

                def one_is_done(reported):
                    rows = (reported["operation"] or {}).get("workers", [])
                    return [row["progress"] for row in rows] == ["done", "asked"]

                await running.until("/weights", one_is_done)
                await victim.kill()
            reported = answers[0].json()
            assert answers[0].status_code == 502
            assert [each["standing"] for each in reported["results"]] == ["restored", "uncertain"]
            chat = await running.client.post("/v1/chat/completions", json=CHAT)
            assert (chat.status_code, chat.headers["x-omni-weight-version"]) == (200, "v2")
            name = reported["results"][1]["worker"].replace("/", "%2F")
            gone = await running.client.put(f"/workers/{name}", json={"is_dead": True})
            assert gone.status_code == 200, json.dumps(gone.json())
            again = await running.client.post(UPDATE, json={**body, "weight_version": "v3"})
            assert (again.status_code, again.json()["worker_count"]) == (200, 1)


async def test_without_a_drain_a_response_across_the_change_is_labelled(tmp_path, new_weights):
    file = tmp_path / "proxy.toml"
    long = {**CHAT, "max_tokens": 400, "ignore_eos": True}
    body = {"model_path": new_weights.path, "weight_version": "v2"}
    async with replicas(1) as (one,):
        file.write_text(toml([one]))
        async with program("--config", file) as running:
            await known(running, 1)
            answers = []

            async def ask():
                answers.append(await running.client.post("/v1/chat/completions", json=long))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await running.until(
                    "/workers", lambda body: body["workers"][0]["active_requests"] == 1
                )
                pause = await running.client.post("/pause_generation", json={"mode": "retract"})
                assert (pause.status_code, pause.json()["status"]) == (200, "ok")
                assert (await running.client.post(UPDATE, json=body)).status_code == 200
                assert not answers
                assert (await running.client.post("/continue_generation", json={})).is_success
            (answer,) = answers
            reported = {name: answer.headers[name] for name in answer.headers if "weight" in name}
            assert (answer.status_code, reported) == (
                200,
                {
                    "x-omni-weight-version": "default",
                    "x-omni-weight-version-end": "v2",
                    "x-omni-weight-epoch-end": "1",
                },
            )
            assert (await running.get_json("/status"))["data_plane"]["answers_across_versions"] == 1


async def test_a_replica_restarted_after_an_update_does_not_serve_its_first_weights(
    tmp_path, new_weights
):
    file = tmp_path / "proxy.toml"
    body = {"model_path": new_weights.path, "weight_version": "v2"}
    async with replicas(2) as (survivor, late):
        file.write_text(toml([survivor, late]))
        async with program("--config", file) as running:
            await known(running, 2)
            assert (await running.client.post(UPDATE, json=body)).status_code == 200
            await late.kill()
            await running.until(
                "/workers", lambda body: record(body, late)["weight_version"] is None
            )
            await late.start()
            reported = await running.until(
                "/workers", lambda body: record(body, late)["held_by"] == ["uncertain"]
            )
            assert record(reported, late)["weight_version"] == "default"
            reasons = (await running.get_json("/weights"))["uncertain"]
            assert reasons == {late.url: "missed the update to 'v2': it returned with 'default'"}
            assert (await running.client.post("/continue_generation", json={})).is_success
            assert not record(await running.get_json("/workers"), late)["routable"]
            assert (await running.client.post(UPDATE, json=body)).status_code == 200
            assert (await known(running, 2))["routable_workers"] == 2
