from prometheus_client.parser import text_string_to_metric_families

from tests.replica.api.api_fixture import until


async def scrape(api):
    """Every sample by name, each checked for its `model_name` label."""
    response = await api.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families((await response.get_data()).decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            if sample.labels.get("le", "+Inf") == "+Inf":
                samples[sample.name] = sample.value
    return samples


async def test_gauges_are_exported_before_any_request(tiny):
    await until(lambda: any(tiny.client.stats().values()))  # a stage reports only after it is ready
    samples = await scrape(tiny)
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput",
                 "cache_hit_rate", "prompt_tokens_total", "generation_tokens_total"):  # fmt: skip
        assert samples[f"sglang:{name}"] == 0
    assert samples["sglang:max_total_num_tokens"] > 0


async def test_tokens_and_times_of_requests_are_counted(tiny):
    for stream in (False, True):
        body = {"prompt": "hi", "max_tokens": 3, "stream": stream, "temperature": 0}
        assert (await tiny.post("/v1/completions", body)).status_code == 200
    await until(lambda: tiny.client.stats()["decode"]["generation_tokens_total"] == 6)
    samples = await scrape(tiny)
    assert samples["sglang:generation_tokens_total"] == 6
    assert samples["sglang:prompt_tokens_total"] > 0
    assert samples["sglang:num_requests_total"] == 2
    assert samples["sglang:e2e_request_latency_seconds_count"] == 2
    assert samples["sglang:time_to_first_token_seconds_count"] == 1
    assert "sglang:num_aborted_requests_total" not in samples


async def test_a_failed_request_is_counted_as_aborted(api):
    await api.chat({"bug": "oops"})
    await api.chat({"chunks": [{"text": "a"}], "bug": "oops"}, stream=True)
    samples = await scrape(api)
    assert samples["sglang:num_aborted_requests_total"] == 2
    assert "sglang:num_requests_total" not in samples


async def test_two_apps_count_separately(api):
    await api.chat()
    assert (await scrape(api))["sglang:num_requests_total"] == 1
    assert "sglang:num_requests_total" not in await scrape(api.with_options())
