"""New weights from a file on two real replicas, under traffic."""

import json

import pytest
import trio

from tests.promises.support.fleet_program import program, record
from tests.promises.support.tiny_fleet import CHAT, UPDATE, known, replicas, toml

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("soon")


async def test_with_a_drain_no_request_fails_and_no_response_mixes_versions(tmp_path, new_weights):
    file = tmp_path / "proxy.toml"
    responses = []
    async with replicas(2) as fleet:
        file.write_text(toml(fleet, "drain_secs = 30"))
        async with program("--config", file) as running:
            await known(running, 2)
            stopped = trio.Event()

            async def ask():
                while not stopped.is_set():
                    responses.append(await running.client.post("/v1/chat/completions", json=CHAT))

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask)
                while len(responses) < 6:
                    await trio.sleep(0.02)
                body = {"model_path": new_weights.path, "weight_version": "v2"}
                updated = await running.client.post(UPDATE, json=body)
                before = len(responses)
                while len(responses) < before + 6:
                    await trio.sleep(0.02)
                stopped.set()
            result = updated.json()
            assert (updated.status_code, result["weight_epoch"]) == (200, 1), result
            checksums = result["verification"]["checksums"]
            assert checksums == {replica.url: new_weights.checksum for replica in fleet}
            assert {response.status_code for response in responses} == {200}
            spanning = [
                response.headers
                for response in responses
                if "x-omni-weight-version-end" in response.headers
            ]
            assert not spanning
            texts = {}
            for response in responses:
                text = response.json()["choices"][0]["message"]["content"]
                texts.setdefault(response.headers["x-omni-weight-version"], set()).add(text)
            assert sorted(texts) == ["default", "v2"]
            assert [len(values) for values in texts.values()] == [1, 1]
            assert texts["default"] != texts["v2"]


async def test_a_replica_killed_during_an_update_is_uncertain_and_the_next_works(
    tmp_path, new_weights
):
    file = tmp_path / "proxy.toml"
    body = {"model_path": new_weights.path, "weight_version": "v2"}
    async with replicas(2) as (survivor, victim):
        file.write_text(toml([survivor, victim], ""))
        async with program("--config", file) as running:
            await running.until("/workers", lambda body: body["routable_workers"] == 2)
            # A stopped process accepts the call and never answers, so it dies during the call.
            victim.stop()
            responses = []

            async def update():
                responses.append(await running.client.post(UPDATE, json=body))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(update)

                def survivor_is_updated(weights):
                    rows = (weights["operation"] or {}).get("workers", [])
                    return [row["progress"] for row in rows] == ["done", "asked"]

                await running.until("/weights", survivor_is_updated)
                await victim.kill()
            result = responses[0].json()
            assert responses[0].status_code == 502
            assert [entry["standing"] for entry in result["results"]] == ["restored", "uncertain"]
            chat = await running.client.post("/v1/chat/completions", json=CHAT)
            assert (chat.status_code, chat.headers["x-omni-weight-version"]) == (200, "v2")
            name = result["results"][1]["worker"].replace("/", "%2F")
            marked_dead = await running.client.put(f"/workers/{name}", json={"is_dead": True})
            assert marked_dead.status_code == 200, json.dumps(marked_dead.json())
            next_update = await running.client.post(UPDATE, json={**body, "weight_version": "v3"})
            assert (next_update.status_code, next_update.json()["worker_count"]) == (200, 1)


async def test_without_a_drain_a_response_across_an_update_has_both_labels(tmp_path, new_weights):
    file = tmp_path / "proxy.toml"
    long = {**CHAT, "max_tokens": 400, "ignore_eos": True}
    body = {"model_path": new_weights.path, "weight_version": "v2"}
    async with replicas(1) as (one,):
        file.write_text(toml([one]))
        async with program("--config", file) as running:
            await known(running, 1)
            responses = []

            async def ask():
                responses.append(await running.client.post("/v1/chat/completions", json=long))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await running.until(
                    "/workers", lambda body: body["workers"][0]["active_requests"] == 1
                )
                pause = await running.client.post("/pause_generation", json={"mode": "retract"})
                assert (pause.status_code, pause.json()["status"]) == (200, "ok")
                assert (await running.client.post(UPDATE, json=body)).status_code == 200
                assert not responses
                assert (await running.client.post("/continue_generation", json={})).is_success
            (response,) = responses
            weight_headers = {
                name: response.headers[name] for name in response.headers if "weight" in name
            }
            assert (response.status_code, weight_headers) == (
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
            listed = await running.until(
                "/workers", lambda body: record(body, late)["held_by"] == ["uncertain"]
            )
            assert record(listed, late)["weight_version"] == "default"
            reasons = (await running.get_json("/weights"))["uncertain"]
            assert reasons == {late.url: "missed the update to 'v2': it returned with 'default'"}
            assert (await running.client.post("/continue_generation", json={})).is_success
            assert not record(await running.get_json("/workers"), late)["routable"]
            assert (await running.client.post(UPDATE, json=body)).status_code == 200
            assert (await known(running, 2))["routable_workers"] == 2
