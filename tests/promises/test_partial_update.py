"""An update that only some workers took: who did serves on, who did not is out, both are told."""

import pytest

from tests.promises.engines import engines
from tests.promises.fleet_program import program, record, toml

pytestmark = pytest.mark.usefixtures("soon")
UPDATE = "/update_weights_from_disk"


def body(version):
    return {"model_path": f"/{version}", "weight_version": version}


async def test_one_that_dies_in_the_middle_is_out_and_the_survivor_serves(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as (survivor, victim):
        victim.dies_at = UPDATE
        file.write_text(toml([survivor, victim]))
        async with program("--config", file) as running:
            await running.until_routable(survivor, victim)
            answer = await running.client.post(UPDATE, json=body("v2"))
            reported = answer.json()
            assert (answer.status_code, reported["success"], reported["status"]) == (
                502,
                False,
                "error",
            )
            well, lost = reported["results"]
            assert (well["success"], well["standing"]) == (True, "restored")
            assert (lost["success"], lost["standing"]) == (False, "uncertain")
            assert lost["error"]
            shown = await running.until_routable(survivor)
            assert record(shown, victim)["held_by"] == ["uncertain"]
            assert record(shown, survivor)["weight_version"] == "v2"
            victim.dies_at = ""
            answer = await running.client.post(UPDATE, json=body("v3"))
            assert (answer.status_code, answer.json()["message"]) == (200, "ok")
            await running.until_routable(survivor, victim)


async def test_an_update_that_all_refuse_changes_nothing(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as both:
        for engine in both:
            engine.says[UPDATE] = (400, {"detail": {"success": False, "message": "no such file"}})
        file.write_text(toml(both))
        async with program("--config", file) as running:
            await running.until_routable(*both)
            answer = await running.client.post(UPDATE, json=body("v2"))
            assert answer.status_code == 502
            assert {each["standing"] for each in answer.json()["results"]} == {"restored"}
            await running.until_routable(*both)
            assert (await running.get_json("/weights"))["weight_epoch"] == 0


async def test_replicas_that_differ_afterwards_are_out_and_one_that_cannot_report_is_not(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(4) as (one, two, odd, mute):
        sums = {"per_gpu_checksum": "f" * 64}
        odd.says["/weights_checker"] = (200, {"success": True, "results": [{"data": sums}]})
        for path in ("/weights_checker", "/weight_checker"):  # SGLang's and vLLM's
            mute.says[path] = (404, {"detail": "Not Found"})
        file.write_text(toml([one, two, odd, mute]))
        async with program("--config", file) as running:
            await running.until_routable(one, two, odd, mute)
            answer = await running.client.post(UPDATE, json=body("v2"))
            reported = answer.json()
            assert (answer.status_code, reported["success"]) == (502, False)
            verified = reported["verification"]
            assert verified["mismatched"] == [odd.url]
            assert verified["unverified"] == [mute.url]
            assert "404" in verified["reasons"][mute.url]
            assert sorted(verified["checked"]) == sorted([one.url, two.url])
            shown = await running.until_routable(one, two, mute)
            assert record(shown, odd)["held_by"] == ["uncertain"]


async def test_workers_of_several_versions_are_a_409(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as (one, two):
        two.version = "other"
        file.write_text(toml([one, two]))
        async with program("--config", file) as running:
            await running.until_routable(one, two)
            answer = await running.client.get("/model_info")
            detail = answer.json()["detail"]
            assert answer.status_code == 409
            assert detail["mixed_state"] == {"weight_version": ["default", "other"]}
            assert len(detail["workers"]) == 2
