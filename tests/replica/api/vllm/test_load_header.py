"""The endpoint-load-metrics header, as captured from vLLM 0.32 (note:real-engines 5.3)."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_proxy.wire.load_report import LoadReport, load_of_header, loads_of_metrics
from tests.replica.api.api_fixture import opened

HEADER = "endpoint-load-metrics"
PROMPT = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture
def loaded(engine, monkeypatch):
    """An engine that reports three waiting requests and a quarter of its cache in use."""
    stats = {"decode": {"num_waiting_reqs": 3.0, "num_running_reqs": 2.0, "token_usage": 0.25}}
    monkeypatch.setattr(engine.client, "stats", lambda: stats)
    return engine


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
