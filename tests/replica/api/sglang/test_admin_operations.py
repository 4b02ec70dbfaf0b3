from dataclasses import replace

import pytest

from tests.replica.api.api_fixture import TINY, opened

KEY = "sesame"
PAUSE, CONTINUE, INFO = "/pause_generation", "/continue_generation", "/model_info"


@pytest.fixture
async def locked(tiny):
    return tiny.with_options(admin_api_key=KEY)


def bearer(key=KEY, scheme="Bearer"):
    return {"headers": {"authorization": f"{scheme} {key}"}}


async def status_and_body(response):
    return response.status_code, await response.get_json()


# Operations


async def test_pause_and_continue_return_the_aggregate_of_all_stages(tiny):
    status, body = await status_and_body(await tiny.post(PAUSE, {"mode": "retract"}))
    assert status == 200
    assert list(body)[:5] == ["op_id", "action", "success", "message", "results"]
    assert (body["status"], body["num_paused_requests"]) == ("ok", 0)
    assert (body["action"], body["success"], body["message"]) == ("pause_generation", True, "ok")
    by_stage = {result["stage"]: result for result in body["results"]}
    assert by_stage["prepare"]["data"] == {"skipped": True, "unsupported": True}
    assert by_stage["decode"]["data"]["mode"] == "retract"
    assert list(by_stage["decode"]) == [
        "op_id", "stage", "action", "success", "message", "data", "error", "rank", "role",
    ]  # fmt: skip
    status, body = await status_and_body(await tiny.post(CONTINUE))
    assert (status, body["success"]) == (200, True)


async def test_a_paused_server_stays_healthy(tiny):
    await tiny.post(PAUSE)
    assert (await tiny.get("/health")).status_code == 200


async def test_a_failed_operation_is_a_400_whose_detail_is_the_aggregate(tiny):
    status, body = await status_and_body(await tiny.post(PAUSE, {"mode": "sideways"}))
    assert status == 400
    assert body["detail"]["success"] is False
    assert body["detail"]["message"] == "invalid pause mode: sideways"


async def test_the_stages_key_selects_the_stages(tiny):
    _, body = await status_and_body(await tiny.post(PAUSE, {"stages": ["prepare"]}))
    assert [result["stage"] for result in body["results"]] == ["prepare"]


async def test_an_unknown_stage_and_a_timeout_have_distinct_errors(tiny):
    status, body = await status_and_body(await tiny.post(PAUSE, {"stages": ["decod"]}))
    assert status == 400
    assert "decode" in body["detail"]
    status, body = await status_and_body(await tiny.post(PAUSE, {"timeout_s": 0}))
    assert status == 504
    assert "pause_generation" in body["detail"]


async def test_a_pipeline_without_admin_stages_can_be_paused(api):
    status, body = await status_and_body(await api.post(PAUSE))
    assert (status, body["success"]) == (200, True)
    assert body["results"][0]["data"]["skipped"] is True


# Model info


async def test_model_info_is_the_aggregate_and_the_facts_common_to_all_stages(tiny):
    for response in (await tiny.get(INFO), await tiny.post(INFO)):
        status, body = await status_and_body(response)
        assert status == 200
        assert list(body) == [
            "op_id", "action", "success", "message", "results",
            "weight_version", "model_path", "load_format", "weight_sync", "dtype",
            "kv_cache_dtype", "cache_epoch", "disable_radix_cache", "stages",
        ]  # fmt: skip
        assert body["weight_version"] == "default"
        assert (body["weight_sync"]["state"], body["weight_sync"]["weights"]) == ("idle", "whole")
        assert body["stages"] == body["results"]


async def test_stages_with_different_weight_versions_are_a_409():
    decode = next(stage for stage in TINY.stages if stage.name == "decode")
    other = replace(decode, name="other", factory="tests.replica.api.api_fixture:build_newer")
    stages = tuple(
        replace(stage, next=(*stage.next, "other")) if stage.name == "prepare" else stage
        for stage in TINY.stages
    )
    async with opened(replace(TINY, stages=(*stages, other))) as api:
        status, body = await status_and_body(await api.get(INFO))
    assert status == 409
    detail = body["detail"]
    assert list(detail) == ["success", "message", "mixed_state", "stages", "admin"]
    assert detail["message"] == "mixed stage weight_version"
    assert detail["mixed_state"] == {"weight_version": ["default", "v2"]}
    assert {result["stage"] for result in detail["stages"]} == {"decode", "other"}
    assert detail["admin"]["action"] == "model_info"


# The key


def refusal(path, message):
    top_level = {"success": False, "message": message, "status": "error"} if path != INFO else {}
    return {**top_level, "detail": message}


@pytest.mark.parametrize("path", [PAUSE, CONTINUE, INFO])
async def test_a_missing_key_is_a_401_and_a_wrong_one_a_403(locked, path):
    response = await locked.post(path, {})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    missing = "Admin API key required: Authorization: Bearer <key>"
    assert await response.get_json() == refusal(path, missing)
    status, body = await status_and_body(await locked.post(path, {}, **bearer("other")))
    assert (status, body) == (403, refusal(path, "Invalid admin API key"))
    assert (await locked.post(path, {}, **bearer())).status_code == 200


async def test_the_scheme_is_case_insensitive_and_any_other_counts_as_missing(locked):
    assert (await locked.get(INFO, **bearer(scheme="bEARER"))).status_code == 200
    assert (await locked.get(INFO, **bearer(scheme="Basic"))).status_code == 401
    assert (await locked.get(INFO, **bearer(key=""))).status_code == 401


async def test_invalid_json_is_refused_before_the_key_check_and_other_errors_after_it(locked):
    assert (await locked.post(PAUSE, b"{")).status_code == 422
    assert (await locked.post(PAUSE, b"")).status_code == 401
    assert (await locked.post(PAUSE, {"stages": "x"})).status_code == 401
    assert (await locked.post(PAUSE, b"", **bearer())).status_code == 422
    assert (await locked.post(PAUSE, {"stages": "x"}, **bearer())).status_code == 422


async def test_the_key_of_the_environment_applies_unless_an_option_sets_one(tiny, monkeypatch):
    monkeypatch.setenv("SGLANG_OMNI_ADMIN_KEY", KEY)
    assert (await tiny.with_options().get(INFO)).status_code == 401
    configured = tiny.with_options(admin_api_key="other")
    assert (await configured.get(INFO, **bearer("other"))).status_code == 200


async def test_flushing_the_cache_needs_the_key_too(locked):
    assert (await locked.post("/flush_cache")).status_code == 401
    response = await locked.post("/flush_cache", **bearer())
    assert (response.status_code, await response.get_data()) == (200, b"Cache flushed.\n")
