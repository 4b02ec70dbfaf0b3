"""Trainers at real replicas: what they send wrong, who crashes under them, and two at once."""

import json
import struct
from functools import partial

import httpx
import pytest
import trio

from tests.promises.fleet_program import program, record
from tests.promises.tiny_fleet import CHAT, UPDATE, known, replicas, toml

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("soon")
DISTRIBUTED = "/update_weights_from_distributed"
NORM = "model.norm.weight"
MIB = 2**20


async def sglang_sync(client, path, version):
    """A weight refresh as a trainer written for sglang does it, with what it looks at."""

    async def post(path, body):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text[:500])
        return answer

    assert (await post("/pause_generation", {"mode": "retract"})).json()["status"] == "ok"
    reported = (await post(UPDATE, {"model_path": path, "weight_version": version})).json()
    assert reported["success"] is True
    assert isinstance(reported["message"], str)
    assert (await post("/continue_generation", {})).json()["status"] == "ok"
    assert (await client.get("/flush_cache")).status_code == 200
    rows = (await post("/get_weights_by_name", {"name": NORM, "truncate_size": 4})).json()
    assert [type(each) for each in rows] == [float] * 4
    info = (await client.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == (version, path)
    assert (await client.get("/get_model_info")).json()["weight_version"] == version
    named = (await post("/update_weight_version", {"new_version": f"{version}b"})).json()
    assert named["success"] is True
    return rows


async def test_a_trainer_of_sglang_finds_at_the_proxy_what_it_finds_at_one_replica(
    tmp_path, new_weights
):
    file = tmp_path / "proxy.toml"
    async with replicas(2) as both:
        file.write_text(toml(both))
        async with program("--config", file) as running:
            await known(running, 2)
            alone = httpx.AsyncClient(
                base_url=both[0].url, timeout=15, trust_env=False, verify=False
            )
            async with alone:
                at_one = await sglang_sync(alone, new_weights.path, "v1")
            assert await sglang_sync(running.client, new_weights.path, "v2") == at_one
            sums = (await running.client.post("/weights_checker", json={})).json()
            for each in sums["results"]:
                (reported,) = [
                    r["data"] for r in each["body"]["results"] if "checksums" in r["data"]
                ]
                assert reported["full_checksum"] == new_weights.checksum


def truncated(path, into):
    into.write_bytes(path.read_bytes()[:-10])
    return str(into)


def misshapen(into):
    """One tensor of the model, in a shape that is not its own."""
    entry = {NORM: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    header = json.dumps(entry).encode()
    into.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return str(into)


async def test_what_a_trainer_sends_wrong_is_a_4xx_and_touches_nothing(tmp_path, new_weights):
    root = tmp_path / "weights"
    root.mkdir()
    inside = root / "new.safetensors"
    inside.write_bytes((tmp_path / "new.safetensors").read_bytes())
    (root / "link.safetensors").symlink_to(tmp_path / "new.safetensors")
    one = {"names": [NORM], "dtypes": ["float32"], "shapes": [[128]]}
    wrong = [
        (DISTRIBUTED, one | {"dtypes": []}),
        (DISTRIBUTED, one | {"shapes": [[128], [1]]}),
        (DISTRIBUTED, one | {"dtypes": ["float33"]}),
        (DISTRIBUTED, one | {"shapes": [[64]]}),
        (DISTRIBUTED, one | {"names": ["no.such.tensor"]}),
        (DISTRIBUTED, one | {"shapes": [[2**63]]}),
        (DISTRIBUTED, one | {"shapes": [[-1]]}),
        (DISTRIBUTED, one | {"shapes": [[1.5]]}),
        (DISTRIBUTED, one | {"shapes": [["NaN"]]}),
        (DISTRIBUTED, one),  # no such group
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
    async with replicas(1, "--weights-root", str(root)) as (one_replica,):
        file.write_text(toml([one_replica], "mode = 'off'"))
        alone = httpx.AsyncClient(
            base_url=one_replica.url, timeout=15, trust_env=False, verify=False
        )
        async with program("--config", file) as running, alone:
            await known(running, 1)
            before = (await alone.get("/weights_checker")).json()["results"][-1]["data"]
            for path, body in wrong:
                answer = await alone.post(path, json=body)
                reported = answer.json()
                assert 400 <= answer.status_code < 500, (path, body, reported)
                assert (reported["success"], reported["status"]) == (False, "error")
                assert reported["message"], (path, body)
                # A refused receive leaves the engine paused, as it always did; a refused file not.
                await alone.post("/continue_generation", json={})
                if path == UPDATE:
                    answer = await running.client.post(path, json=body)
                    (result,) = answer.json()["results"]
                    assert answer.status_code == 502
                    assert 400 <= result["status_code"] < 500
                    assert result["standing"] == "restored", (path, body, result)
            answer = await alone.post(DISTRIBUTED, content=b'{"names": [NaN]}')
            assert answer.status_code == 422
            paused = (await alone.get("/model_info")).json()["results"][-1]["data"]
            assert paused["engine_paused"] is False
            assert (await alone.post(DISTRIBUTED, json=one)).status_code == 400
            paused = (await alone.get("/model_info")).json()["results"][-1]["data"]
            assert paused["engine_paused"] is True
            await alone.post("/continue_generation", json={})
            many = {"names": ["n" * (17 * MIB)], "dtypes": ["float32"], "shapes": [[1]]}
            for client in (alone, running.client):
                big = json.dumps({**many, "group_name": "g" * (48 * MIB)}).encode()
                # In a thread: httpx leaves an upload that was refused early to be collected.
                url = client.base_url.join(DISTRIBUTED)
                refused = await trio.to_thread.run_sync(partial(httpx.post, url, content=big))
                assert (refused.status_code, refused.json()["success"]) == (413, False)
                # Seventeen are not too many: what is wrong with these is said by the stage.
                answer = await client.post(DISTRIBUTED, json=many)
                assert answer.status_code == (400 if client is alone else 502)
                assert "n" * 20 in answer.text
            await running.client.post("/weights/resolve", json={"acknowledge": True})
            after = (await alone.get("/weights_checker")).json()["results"][-1]["data"]
            assert after["full_checksum"] == before["full_checksum"]
            reported = await known(running, 1)
            assert record(reported, one_replica)["weight_version"] == "default"
            assert (await running.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_proxy_killed_in_the_middle_keeps_its_targets_out_and_one_trainer_at_a_time(
    tmp_path, new_weights
):
    file = tmp_path / "proxy.toml"
    body = {"model_path": new_weights.path, "weight_version": "v2"}
    async with replicas(2) as both, trio.open_nursery() as nursery:
        file.write_text(toml(both, more="[admin]\nlock_timeout_secs = 0.2\n"))
        async with program("--config", file) as running:
            await known(running, 2)
            both[1].stop()

            async def update():
                with pytest.raises(httpx.HTTPError):
                    await running.client.post(UPDATE, json=body, headers={"User-Agent": "first"})

            nursery.start_soon(update)

            def half_done(reported):
                rows = (reported["operation"] or {}).get("workers", [])
                return [row["progress"] for row in rows] == ["done", "asked"]

            await running.until("/weights", half_done)
            second = await running.client.post(UPDATE, json=body | {"weight_version": "v3"})
            assert second.status_code == 503
            assert (
                "update_weights_from_disk of first from 127.0.0.1 began" in second.json()["message"]
            )
            reported = await running.get_json("/workers")
            assert [each["weight_version"] for each in reported["workers"]] == [None, None]
            running.process.kill()
            await running.process.wait()
        both[1].go_on()
        async with program("--config", file) as running:
            reported = await running.until("/workers", lambda body: body["healthy_workers"] == 2)
            assert [each["held_by"] for each in reported["workers"]] == [["uncertain"]] * 2
            reasons = (await running.get_json("/weights"))["uncertain"]
            assert all(
                "the proxy ended while update_weights_from_disk" in r for r in reasons.values()
            )
            assert (await running.client.post("/continue_generation", json={})).is_success
            assert (await running.get_json("/workers"))["routable_workers"] == 0
            answer = await running.client.post("/weights/resolve", json={"acknowledge": True})
            assert (answer.status_code, len(answer.json()["resolved_worker_ids"])) == (200, 2)
            reported = await known(running, 2)
            # That is why nobody was sure: one has them, and of the other nothing was heard.
            assert reported["workers"][0]["weight_version"] == "v2"
            assert (await running.client.post(UPDATE, json=body)).status_code == 200
            reported = await known(running, 2)
            assert [each["weight_version"] for each in reported["workers"]] == ["v2", "v2"]
            answer = await running.client.post("/v1/chat/completions", json=CHAT)
            assert (answer.status_code, answer.headers["x-omni-weight-version"]) == (200, "v2")
