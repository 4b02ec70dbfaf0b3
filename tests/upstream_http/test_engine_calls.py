import json

import pytest

from omni_proxy.upstream_http.client import flush_cache, generate_token
from tests.admin_api.api_fixture import A, build_api, entry
from tests.admin_api.fake_engines import Engines


@pytest.fixture
def engine(monkeypatch):
    return Engines().install(monkeypatch)


@pytest.fixture
def worker():
    return build_api(entry(A, model="m")).worker(A)


async def test_a_flush_uses_the_route_that_the_engine_has(engine, worker):
    engine.set_reply(A, "/reset_prefix_cache", {"success": True})
    outcome = await flush_cache(worker, {}, 5)
    assert outcome.ok
    assert [request.url.path for request in engine.requests] == [
        "/flush_cache",
        "/reset_prefix_cache",
    ]


async def test_a_refused_flush_is_not_retried_on_another_route(engine, worker):
    engine.set_reply(A, "/flush_cache", {}, status=400)
    engine.set_reply(A, "/reset_prefix_cache", {"success": True})
    assert (await flush_cache(worker, {}, 5)).status == 400


async def test_an_engine_without_a_generating_health_check_gets_a_completion_request(
    engine, worker
):
    engine.set_reply(A, "/health", {})
    engine.set_reply(A, "/v1/completions", {"choices": []})
    assert (await generate_token(worker, {"authorization": "Bearer k"}, 5)).ok
    sent = json.loads(engine.requests[-1].content)
    assert (sent["model"], sent["max_tokens"]) == ("m", 1)
    assert engine.requests[-1].headers["authorization"] == "Bearer k"


async def test_a_health_route_alone_does_not_count_as_generation(engine, worker):
    engine.set_reply(A, "/health", {})
    outcome = await generate_token(worker, {}, 5)
    assert outcome.status == 404
    assert "/health" not in [request.url.path for request in engine.requests]
