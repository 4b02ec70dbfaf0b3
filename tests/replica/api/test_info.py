import trio

from tests.replica.api.world import HOLD, until

KEY = {"headers": {"authorization": "Bearer sesame"}}


async def get_json(world, path):
    answer = await world.get(path)
    assert answer.status_code == 200
    return await answer.get_json()


async def test_server_info_has_what_routers_trainers_and_benchmarks_read(tiny):
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


async def test_model_info_of_sglang_is_flat_and_open(tiny):
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


async def test_facts_of_a_stopped_pipeline_are_those_last_seen(tiny):
    before = await get_json(tiny, "/get_model_info")
    tiny.client._coordinator.stop()
    assert await get_json(tiny, "/get_model_info") == before


async def test_a_pipeline_without_weights_has_its_configured_path(world):
    named = world.with_options(model_path="here")
    body = await get_json(named, "/server_info")
    assert (body["model_path"], body["weight_version"]) == ("here", None)


async def test_loads_tell_what_runs_in_three_shapes(world):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: world.chat(HOLD, request_id="R"))
        await until(
            lambda: (
                world.client.stats().get("play", {}).get("num_running_reqs", 0) == 1
                or world.client.stats().get("play", {}).get("num_waiting_reqs", 0) == 1
            )
        )
        for path in ("/v1/loads", "/get_loads"):
            body = await get_json(world, path)
            (load,) = body["loads"]
            assert load["num_running_reqs"] + load["num_waiting_reqs"] == 1
            assert load["num_total_reqs"] == body["aggregate"]["total_reqs"] == 1
            assert body["dp_rank_count"] == 1
            assert set(load) == {
                "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens",
                "num_total_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage",
                "gen_throughput", "cache_hit_rate", "utilization", "max_running_requests",
            }  # fmt: skip
        (rank,) = await get_json(world, "/get_load")
        assert rank["dp_rank"] == 0
        assert rank["num_reqs"] == 1
        await world.client.abort("R")
