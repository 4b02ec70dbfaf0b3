"""endpoint-load-metrics, as captured from vLLM 0.32 (real-engines.md 5.3)."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_proxy.wire.load_report import LoadReport, load_of_header, loads_of_metrics
from tests.replica.api.api_fixture import opened

NAME = "endpoint-load-metrics"
PROMPT = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture
def loaded(engine, monkeypatch):
    """The engine, whose stages report three waiting requests and a quarter of the cache."""
    stats = {"decode": {"num_waiting_reqs": 3.0, "num_running_reqs": 2.0, "token_usage": 0.25}}
    monkeypatch.setattr(engine.client, "stats", lambda: stats)
    return engine


async def asked(world, form, path="/v1/completions", body=None):
    answer = await world.post(path, body or PROMPT, headers={NAME + "-format": form})
    assert answer.status_code == 200
    return answer.headers.get(NAME)


async def test_a_response_has_the_load_in_the_format_that_was_asked_for(loaded):
    assert await asked(loaded, "JSON") == (
        'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}'
    )
    assert await asked(loaded, "text") == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
    )
    reported = await asked(loaded, "JSON", "/v1/chat/completions", CHAT)
    assert load_of_header(reported.encode()) == LoadReport(3.0, 0.25)


@pytest.mark.parametrize("form", ["", "BIN", "json, text"])
async def test_another_format_gets_none(loaded, form):
    assert await asked(loaded, form) is None


async def test_a_stream_and_an_error_have_none(loaded):
    assert await asked(loaded, "JSON", body=PROMPT | {"stream": True}) is None
    answer = await loaded.post("/v1/completions", {"prompt": 3}, headers={NAME + "-format": "JSON"})
    assert (answer.status_code, answer.headers.get(NAME)) == (400, None)


async def test_metrics_have_the_same_under_vllms_names(loaded):
    text = await (await loaded.get("/metrics")).get_data()
    assert loads_of_metrics(text) == {0: LoadReport(3.0, 0.25)}
    names = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= names


async def test_behind_sglangs_routes_there_is_neither():
    async with opened(dialect="sglang") as world:
        answer = await world.post("/v1/chat/completions", CHAT, headers={NAME + "-format": "JSON"})
        assert NAME not in answer.headers
        assert b"vllm:" not in await (await world.get("/metrics")).get_data()
