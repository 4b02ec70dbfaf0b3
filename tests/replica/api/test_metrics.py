"""Metrics, and vLLM's load header as captured from vLLM 0.32 (note:real-engines 5.3)."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_proxy.wire.load_report import LoadReport, load_of_header, loads_of_metrics
from tests.replica.api.api_fixture import TINY, opened, until

HEADER = "endpoint-load-metrics"
PROMPT = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


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


@pytest.fixture
async def loaded(monkeypatch):
    """vLLM's routes of an engine that reports three waiting requests and a quarter of its cache."""
    stats = {"decode": {"num_waiting_reqs": 3.0, "num_running_reqs": 2.0, "token_usage": 0.25}}
    async with opened(TINY, dialect="vllm", tokenizer_model="tiny", model_name="tiny") as engine:
        monkeypatch.setattr(engine.client, "stats", lambda: stats)
        yield engine


async def load_header(api, load_format, path="/v1/completions", body=None):
    response = await api.post(path, body or PROMPT, headers={HEADER + "-format": load_format})
    assert response.status_code == 200
    return response.headers.get(HEADER)


async def test_a_response_has_the_load_in_the_requested_format(loaded):
    assert await load_header(loaded, "JSON") == (
        'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}'
    )
    assert await load_header(loaded, "text") == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
    )
    header = await load_header(loaded, "JSON", "/v1/chat/completions", CHAT)
    assert load_of_header(header.encode()) == LoadReport(3.0, 0.25)


@pytest.mark.parametrize("load_format", ["", "BIN", "json, text"])
async def test_an_unknown_format_gets_no_header(loaded, load_format):
    assert await load_header(loaded, load_format) is None


async def test_a_stream_and_an_error_have_no_header(loaded):
    assert await load_header(loaded, "JSON", body=PROMPT | {"stream": True}) is None
    response = await loaded.post(
        "/v1/completions", {"prompt": 3}, headers={HEADER + "-format": "JSON"}
    )
    assert (response.status_code, response.headers.get(HEADER)) == (400, None)


async def test_metrics_have_the_same_values_under_vllms_names(loaded):
    text = await (await loaded.get("/metrics")).get_data()
    assert loads_of_metrics(text) == {0: LoadReport(3.0, 0.25)}
    names = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= names


async def test_the_sglang_dialect_has_neither_the_header_nor_vllms_metrics():
    async with opened(dialect="sglang") as api:
        response = await api.post(
            "/v1/chat/completions", CHAT, headers={HEADER + "-format": "JSON"}
        )
        assert HEADER not in response.headers
        assert b"vllm:" not in await (await api.get("/metrics")).get_data()
