import trio

from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.torch_engine import with_weight_params
from tests.replica.api.api_fixture import HOLD, RECORDED, opened, until

HEALTHY = (
    b'{"status":"healthy","running":true,"stages":["play"],"entry_stage":"play",'
    b'"total_requests":0,"pending_completions":0,"request_states":{},"stream_delivery":'
    b'{"stream_backlog_bytes":0,"open_stream_count":0,"generation_finished_stream_count":0,'
    b'"longest_reader_idle_s":0.0,"failed_stream_count":0}}'
)


async def test_health_matches_the_contract_byte_for_byte(api):
    response = await api.get("/health")
    assert response.status_code == 200
    assert await response.get_data() == HEALTHY


async def test_the_instance_id_is_constant_for_an_app_and_differs_between_apps(api):
    first, again = [(await api.get("/health")).headers["x-omni-instance"] for _ in range(2)]
    other = (await api.with_options().get("/health")).headers["x-omni-instance"]
    assert first == again != other


async def test_a_server_that_warms_up_is_a_503_with_status_starting(api):
    ready = []
    warming = api.with_options(ready=lambda: bool(ready))
    response = await warming.get("/health")
    assert (response.status_code, (await response.get_json())["status"]) == (503, "starting")
    ready.append(True)
    assert (await warming.get("/health")).status_code == 200


async def test_a_stopped_pipeline_is_a_503_with_status_unhealthy(api):
    api.client._coordinator.stop()
    response = await api.get("/health")
    body = await response.get_json()
    assert (response.status_code, body["status"], body["running"]) == (503, "unhealthy", False)


async def test_the_models_list_has_one_model_with_the_served_name(api):
    assert await (await api.get("/v1/models")).get_data() == (
        b'{"object":"list","data":[{"id":"fake","object":"model","created":0,'
        b'"owned_by":"sglang-omni","permission":[{"id":"modelperm-default",'
        b'"object":"model_permission","allow_create_engine":false,"allow_sampling":true,'
        b'"allow_logprobs":true}],"root":"fake"}]}'
    )


async def test_the_icon_is_a_bare_404(api):
    response = await api.get("/favicon.ico")
    assert (response.status_code, await response.get_data()) == (404, b"")


async def test_health_generate_generates_one_token(tiny):
    response = await tiny.get("/health_generate")
    assert (response.status_code, await response.get_data()) == (200, b"")
    await until(lambda: tiny.client.stats()["decode"]["generation_tokens_total"] == 1)


async def test_health_generate_is_a_503_for_a_stopped_pipeline(api):
    RECORDED.requests.clear()
    api.client._coordinator.stop()
    response = await api.get("/health_generate")
    assert response.status_code == 503
    assert "unhealthy" in (await response.get_json())["detail"]
    assert RECORDED.requests == []


async def test_health_generate_does_not_generate_without_a_chat_model(api):
    RECORDED.requests.clear()
    speaking = api.with_options(capabilities=frozenset(("speech",)))
    assert (await speaking.get("/health_generate")).status_code == 200
    assert RECORDED.requests == []


async def test_a_models_card_is_served_by_its_name(api):
    listed = await (await api.get("/v1/models")).get_json()
    response = await api.get("/v1/models/fake")
    assert (response.status_code, await response.get_json()) == (200, listed["data"][0])
    slashed = api.with_options(model_name="org/fake")
    assert (await (await slashed.get("/v1/models/org/fake")).get_json())["id"] == "org/fake"


async def test_an_unknown_models_card_is_a_404_in_openais_format(api):
    response = await api.get("/v1/models/gpt-4o")
    error = (await response.get_json())["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert "'gpt-4o' does not exist" in error["message"]
    assert "'fake'" in error["message"]


# Features that the replica does not have.
ABSENT = {
    "quantization": None,
    "enable_lora": False,
    "max_lora_rank": None,
    "speculative_algorithm": None,
    "fp8_kv_cache_enabled": False,
    "fp8_kv_cache_requires_postprocess": False,
    "fp8_kv_cache_static_scales": False,
}
KEY = {"headers": {"authorization": "Bearer sesame"}}


async def get_json(api, path):
    response = await api.get(path)
    assert response.status_code == 200
    return await response.get_json()


async def test_server_info_has_the_fields_that_routers_and_trainers_read(tiny):
    body = await get_json(tiny, "/server_info")
    assert body["model_path"] == "tiny"
    assert (body["served_model_name"], body["weight_version"]) == ("fake", "default")
    assert (body["tp_size"], body["dp_size"], body["is_generation"]) == (1, 1, True)
    assert body["max_running_requests"] == 16
    assert body["max_total_num_tokens"] > 0
    assert isinstance(body["version"], str)
    assert body["start_time"] > 1_600_000_000
    health = await tiny.get("/health")
    assert body["instance_id"] == health.headers["x-omni-instance"]
    assert body["stages"] == ["prepare", "decode"]
    (state,) = body["internal_states"]
    assert state["num_running_reqs"] == 0
    other = await get_json(tiny, "/get_server_info")
    assert other.keys() == body.keys()


async def test_server_info_reports_dtypes_absent_features_and_the_cache_epoch(tiny):
    body = await get_json(tiny, "/server_info")
    assert (body["dtype"], body["kv_cache_dtype"]) == ("float32", "float32")
    assert {name: body[name] for name in ABSENT} == ABSENT
    assert body["disable_radix_cache"] is False
    assert body["cache_epoch"] == 0
    assert (await tiny.get("/flush_cache")).status_code == 200
    for path in ("/server_info", "/get_server_info", "/model_info"):
        assert (await get_json(tiny, path))["cache_epoch"] == 1


async def test_server_info_reports_a_disabled_prefix_cache():
    config = with_weight_params(
        builtin_pipeline(BuiltinOptions(model="tiny")), {"prefix_cache_entries": 0}
    )
    async with opened(config) as api:
        assert (await get_json(api, "/server_info"))["disable_radix_cache"] is True


async def test_a_pipeline_without_weights_reports_no_dtypes_and_no_cache(api):
    body = await get_json(api, "/server_info")
    assert [body[name] for name in ("dtype", "kv_cache_dtype", "cache_epoch")] == [None] * 3
    assert body["disable_radix_cache"] is None  # unknown: trainers expect a value


async def test_sglangs_model_info_is_flat_and_needs_no_key(tiny):
    locked = tiny.with_options(admin_api_key="sesame")
    assert await get_json(locked, "/get_model_info") == {
        "model_path": "tiny",
        "served_model_name": "fake",
        "tokenizer_path": "tiny",
        "is_generation": True,
        "weight_version": "default",
        "load_format": "auto",
    }
    assert (await locked.get("/model_info")).status_code == 401


async def test_model_info_of_a_stopped_pipeline_is_the_last_known(tiny):
    before = await get_json(tiny, "/get_model_info")
    tiny.client._coordinator.stop()
    assert await get_json(tiny, "/get_model_info") == before


async def test_a_pipeline_without_weights_reports_its_configured_path(api):
    named = api.with_options(model_path="here")
    body = await get_json(named, "/server_info")
    assert (body["model_path"], body["weight_version"]) == ("here", None)


async def test_loads_are_reported_in_three_formats(api):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: api.chat(HOLD, request_id="R"))
        await until(
            lambda: (
                api.client.stats().get("play", {}).get("num_running_reqs", 0) == 1
                or api.client.stats().get("play", {}).get("num_waiting_reqs", 0) == 1
            )
        )
        for path in ("/v1/loads", "/get_loads"):
            body = await get_json(api, path)
            (load,) = body["loads"]
            assert load["num_running_reqs"] + load["num_waiting_reqs"] == 1
            assert load["num_total_reqs"] == body["aggregate"]["total_reqs"] == 1
            assert body["dp_rank_count"] == 1
            assert set(load) == {
                "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens",
                "num_total_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage",
                "gen_throughput", "cache_hit_rate", "utilization", "max_running_requests",
            }  # fmt: skip
        (rank,) = await get_json(api, "/get_load")
        assert rank["dp_rank"] == 0
        assert rank["num_reqs"] == 1
        await api.client.abort("R")
