"""Updates that fail at some workers: updated workers serve, the others leave rotation."""

import pytest

from tests.promises.support.engines import engines
from tests.promises.support.fleet_program import program, record, toml

pytestmark = pytest.mark.usefixtures("soon")
UPDATE = "/update_weights_from_disk"


def body(version):
    return {"model_path": f"/{version}", "weight_version": version}


async def test_a_worker_that_dies_during_an_update_leaves_rotation_and_the_other_serves(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as (survivor, victim):
        victim.dies_at = UPDATE
        file.write_text(toml([survivor, victim]))
        async with program("--config", file) as running:
            await running.until_routable(survivor, victim)
            response = await running.client.post(UPDATE, json=body("v2"))
            result = response.json()
            assert (response.status_code, result["success"], result["status"]) == (
                502,
                False,
                "error",
            )
            updated, failed = result["results"]
            assert (updated["success"], updated["standing"]) == (True, "restored")
            assert (failed["success"], failed["standing"]) == (False, "uncertain")
            assert failed["error"]
            listed = await running.until_routable(survivor)
            assert record(listed, victim)["held_by"] == ["uncertain"]
            assert record(listed, survivor)["weight_version"] == "v2"
            victim.dies_at = ""
            response = await running.client.post(UPDATE, json=body("v3"))
            assert (response.status_code, response.json()["message"]) == (200, "ok")
            await running.until_routable(survivor, victim)


async def test_an_update_that_all_workers_refuse_changes_nothing(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as workers:
        for engine in workers:
            engine.responses[UPDATE] = (
                400,
                {"detail": {"success": False, "message": "no such file"}},
            )
        file.write_text(toml(workers))
        async with program("--config", file) as running:
            await running.until_routable(*workers)
            response = await running.client.post(UPDATE, json=body("v2"))
            assert response.status_code == 502
            assert {result["standing"] for result in response.json()["results"]} == {"restored"}
            await running.until_routable(*workers)
            assert (await running.get_json("/weights"))["weight_epoch"] == 0


async def test_a_checksum_mismatch_removes_a_worker_and_missing_checksums_do_not(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(4) as (one, two, different, unverified):
        checksums = {"per_gpu_checksum": "f" * 64}
        different.responses["/weights_checker"] = (
            200,
            {"success": True, "results": [{"data": checksums}]},
        )
        for path in ("/weights_checker", "/weight_checker"):  # SGLang's and vLLM's
            unverified.responses[path] = (404, {"detail": "Not Found"})
        file.write_text(toml([one, two, different, unverified]))
        async with program("--config", file) as running:
            await running.until_routable(one, two, different, unverified)
            response = await running.client.post(UPDATE, json=body("v2"))
            result = response.json()
            assert (response.status_code, result["success"]) == (502, False)
            verified = result["verification"]
            assert verified["mismatched"] == [different.url]
            assert verified["unverified"] == [unverified.url]
            assert "404" in verified["reasons"][unverified.url]
            assert sorted(verified["checked"]) == sorted([one.url, two.url])
            listed = await running.until_routable(one, two, unverified)
            assert record(listed, different)["held_by"] == ["uncertain"]


async def test_model_info_of_workers_with_different_versions_is_a_409(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as (one, two):
        two.version = "other"
        file.write_text(toml([one, two]))
        async with program("--config", file) as running:
            await running.until_routable(one, two)
            response = await running.client.get("/model_info")
            detail = response.json()["detail"]
            assert response.status_code == 409
            assert detail["mixed_state"] == {"weight_version": ["default", "other"]}
            assert len(detail["workers"]) == 2
