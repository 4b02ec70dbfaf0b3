"""Trainers with real replicas: invalid requests, crashes, and two trainers at once."""

import json
import struct
from functools import partial

import httpx
import pytest
import trio

from tests.promises.support.fleet_program import program, record
from tests.promises.support.tiny_fleet import CHAT, UPDATE, known, replicas, toml

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("soon")
DISTRIBUTED = "/update_weights_from_distributed"
NORM = "model.norm.weight"
MIB = 2**20


async def sglang_sync(client, path, version):
    """Updates weights as a trainer for SGLang does, and checks what it reads back."""

    async def post(path, body):
        response = await client.post(path, json=body)
        assert response.status_code == 200, (path, response.text[:500])
        return response

    assert (await post("/pause_generation", {"mode": "retract"})).json()["status"] == "ok"
    result = (await post(UPDATE, {"model_path": path, "weight_version": version})).json()
    assert result["success"] is True
    assert isinstance(result["message"], str)
    assert (await post("/continue_generation", {})).json()["status"] == "ok"
    assert (await client.get("/flush_cache")).status_code == 200
    values = (await post("/get_weights_by_name", {"name": NORM, "truncate_size": 4})).json()
    assert [type(value) for value in values] == [float] * 4
    info = (await client.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == (version, path)
    assert (await client.get("/get_model_info")).json()["weight_version"] == version
    renamed = (await post("/update_weight_version", {"new_version": f"{version}b"})).json()
    assert renamed["success"] is True
    return values


async def test_a_trainer_for_sglang_gets_the_same_from_the_proxy_as_from_a_replica(
    tmp_path, new_weights
):
    file = tmp_path / "proxy.toml"
    async with replicas(2) as engines:
        file.write_text(toml(engines))
        async with program("--config", file) as running:
            await known(running, 2)
            replica_client = httpx.AsyncClient(
                base_url=engines[0].url, timeout=15, trust_env=False, verify=False
            )
            async with replica_client:
                values_of_replica = await sglang_sync(replica_client, new_weights.path, "v1")
            assert await sglang_sync(running.client, new_weights.path, "v2") == values_of_replica
            checksums = (await running.client.post("/weights_checker", json={})).json()
            for result in checksums["results"]:
                (data,) = [
                    stage["data"]
                    for stage in result["body"]["results"]
                    if "checksums" in stage["data"]
                ]
                assert data["full_checksum"] == new_weights.checksum


def truncated(path, target):
    target.write_bytes(path.read_bytes()[:-10])
    return str(target)


def misshapen(target):
    """Writes one tensor of the model with a wrong shape."""
    entry = {NORM: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    header = json.dumps(entry).encode()
    target.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return str(target)


async def test_invalid_requests_of_a_trainer_get_a_4xx_and_change_nothing(tmp_path, new_weights):
    root = tmp_path / "weights"
    root.mkdir()
    inside = root / "new.safetensors"
    inside.write_bytes((tmp_path / "new.safetensors").read_bytes())
    (root / "link.safetensors").symlink_to(tmp_path / "new.safetensors")
    valid = {"names": [NORM], "dtypes": ["float32"], "shapes": [[128]]}
    invalid = [
        (DISTRIBUTED, valid | {"dtypes": []}),
        (DISTRIBUTED, valid | {"shapes": [[128], [1]]}),
        (DISTRIBUTED, valid | {"dtypes": ["float33"]}),
        (DISTRIBUTED, valid | {"shapes": [[64]]}),
        (DISTRIBUTED, valid | {"names": ["no.such.tensor"]}),
        (DISTRIBUTED, valid | {"shapes": [[2**63]]}),
        (DISTRIBUTED, valid | {"shapes": [[-1]]}),
        (DISTRIBUTED, valid | {"shapes": [[1.5]]}),
        (DISTRIBUTED, valid | {"shapes": [["NaN"]]}),
        (DISTRIBUTED, valid),  # there is no such group
        (UPDATE, {"model_path": str(root / "missing.safetensors")}),
        (UPDATE, {"model_path": truncated(inside, root / "truncated.safetensors")}),
        (UPDATE, {"model_path": misshapen(root / "misshapen.safetensors")}),
        (UPDATE, {"model_path": str(tmp_path / "new.safetensors")}),
        (UPDATE, {"model_path": f"{root}/../new.safetensors"}),
        (UPDATE, {"model_path": str(root / "link.safetensors")}),
        (UPDATE, {"model_path": str(root), "manifest": {"files": ["../new.safetensors"]}}),
        (UPDATE, {}),
    ]
    file = tmp_path / "proxy.toml"
    async with replicas(1, "--weights-root", str(root)) as (replica,):
        file.write_text(toml([replica], "mode = 'off'"))
        replica_client = httpx.AsyncClient(
            base_url=replica.url, timeout=15, trust_env=False, verify=False
        )
        async with program("--config", file) as running, replica_client:
            await known(running, 1)
            before = (await replica_client.get("/weights_checker")).json()["results"][-1]["data"]
            for path, body in invalid:
                response = await replica_client.post(path, json=body)
                error = response.json()
                assert 400 <= response.status_code < 500, (path, body, error)
                assert (error["success"], error["status"]) == (False, "error")
                assert error["message"], (path, body)
                # The engine stays paused after a rejected receive, but not after a rejected file.
                await replica_client.post("/continue_generation", json={})
                if path == UPDATE:
                    response = await running.client.post(path, json=body)
                    (result,) = response.json()["results"]
                    assert response.status_code == 502
                    assert 400 <= result["status_code"] < 500
                    assert result["standing"] == "restored", (path, body, result)
            response = await replica_client.post(DISTRIBUTED, content=b'{"names": [NaN]}')
            assert response.status_code == 422
            state = (await replica_client.get("/model_info")).json()["results"][-1]["data"]
            assert state["engine_paused"] is False
            assert (await replica_client.post(DISTRIBUTED, json=valid)).status_code == 400
            state = (await replica_client.get("/model_info")).json()["results"][-1]["data"]
            assert state["engine_paused"] is True
            await replica_client.post("/continue_generation", json={})
            many = {"names": ["n" * (17 * MIB)], "dtypes": ["float32"], "shapes": [[1]]}
            for client in (replica_client, running.client):
                big = json.dumps({**many, "group_name": "g" * (48 * MIB)}).encode()
                # In a thread: httpx leaves rejected uploads to the garbage collector.
                url = client.base_url.join(DISTRIBUTED)
                refused = await trio.to_thread.run_sync(partial(httpx.post, url, content=big))
                assert (refused.status_code, refused.json()["success"]) == (413, False)
                # 17 MiB are within the limit: the stage reports what is wrong with this body.
                response = await client.post(DISTRIBUTED, json=many)
                assert response.status_code == (400 if client is replica_client else 502)
                assert "n" * 20 in response.text
            await running.client.post("/weights/resolve", json={"acknowledge": True})
            after = (await replica_client.get("/weights_checker")).json()["results"][-1]["data"]
            assert after["full_checksum"] == before["full_checksum"]
            listed = await known(running, 1)
            assert record(listed, replica)["weight_version"] == "default"
            assert (await running.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_after_a_kill_during_an_update_its_targets_are_uncertain(tmp_path, new_weights):
    file = tmp_path / "proxy.toml"
    body = {"model_path": new_weights.path, "weight_version": "v2"}
    async with replicas(2) as engines, trio.open_nursery() as nursery:
        file.write_text(toml(engines, more="[admin]\nlock_timeout_secs = 0.2\n"))
        async with program("--config", file) as running:
            await known(running, 2)
            engines[1].stop()

            async def update():
                with pytest.raises(httpx.HTTPError):
                    await running.client.post(UPDATE, json=body, headers={"User-Agent": "first"})

            nursery.start_soon(update)

            def half_done(weights):
                rows = (weights["operation"] or {}).get("workers", [])
                return [row["progress"] for row in rows] == ["done", "asked"]

            await running.until("/weights", half_done)
            second = await running.client.post(UPDATE, json=body | {"weight_version": "v3"})
            assert second.status_code == 503
            assert (
                "update_weights_from_disk of first from 127.0.0.1 began" in second.json()["message"]
            )
            listed = await running.get_json("/workers")
            assert [worker["weight_version"] for worker in listed["workers"]] == [None, None]
            running.process.kill()
            await running.process.wait()
        engines[1].go_on()
        async with program("--config", file) as running:
            listed = await running.until("/workers", lambda body: body["healthy_workers"] == 2)
            assert [worker["held_by"] for worker in listed["workers"]] == [["uncertain"]] * 2
            reasons = (await running.get_json("/weights"))["uncertain"]
            assert all(
                "the proxy ended while update_weights_from_disk" in reason
                for reason in reasons.values()
            )
            assert (await running.client.post("/continue_generation", json={})).is_success
            assert (await running.get_json("/workers"))["routable_workers"] == 0
            response = await running.client.post("/weights/resolve", json={"acknowledge": True})
            assert (response.status_code, len(response.json()["resolved_worker_ids"])) == (200, 2)
            listed = await known(running, 2)
            # One worker has the new weights; the other had not answered when the proxy was killed.
            assert listed["workers"][0]["weight_version"] == "v2"
            assert (await running.client.post(UPDATE, json=body)).status_code == 200
            listed = await known(running, 2)
            assert [worker["weight_version"] for worker in listed["workers"]] == ["v2", "v2"]
            response = await running.client.post("/v1/chat/completions", json=CHAT)
            assert (response.status_code, response.headers["x-omni-weight-version"]) == (200, "v2")
