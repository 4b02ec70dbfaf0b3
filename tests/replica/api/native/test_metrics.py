from prometheus_client.parser import text_string_to_metric_families

from tests.replica.api.api_fixture import until


async def scraped(world):
    """Every sample by name; the model's label is checked on the way."""
    answer = await world.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families((await answer.get_data()).decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            if sample.labels.get("le", "+Inf") == "+Inf":
                found[sample.name] = sample.value
    return found


async def test_gauges_are_there_before_any_request(tiny):
    await until(lambda: any(tiny.client.stats().values()))  # a stage reports some time after ready
    body = await scraped(tiny)
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput",
                 "cache_hit_rate", "prompt_tokens_total", "generation_tokens_total"):  # fmt: skip
        assert body[f"sglang:{name}"] == 0
    assert body["sglang:max_total_num_tokens"] > 0


async def test_tokens_and_times_of_requests_are_counted(tiny):
    for stream in (False, True):
        body = {"prompt": "hi", "max_tokens": 3, "stream": stream, "temperature": 0}
        assert (await tiny.post("/v1/completions", body)).status_code == 200
    await until(lambda: tiny.client.stats()["decode"]["generation_tokens_total"] == 6)
    reported = await scraped(tiny)
    assert reported["sglang:generation_tokens_total"] == 6
    assert reported["sglang:prompt_tokens_total"] > 0
    assert reported["sglang:num_requests_total"] == 2
    assert reported["sglang:e2e_request_latency_seconds_count"] == 2
    assert reported["sglang:time_to_first_token_seconds_count"] == 1
    assert "sglang:num_aborted_requests_total" not in reported


async def test_a_request_that_fails_is_counted_as_not_finished(world):
    await world.chat({"bug": "oops"})
    await world.chat({"chunks": [{"text": "a"}], "bug": "oops"}, stream=True)
    body = await scraped(world)
    assert body["sglang:num_aborted_requests_total"] == 2
    assert "sglang:num_requests_total" not in body


async def test_two_apps_count_apart(world):
    await world.chat()
    assert (await scraped(world))["sglang:num_requests_total"] == 1
    assert "sglang:num_requests_total" not in await scraped(world.with_options())
