import time

import pytest

from omni_proxy.telemetry.history import POINTS, SERIES
from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.telemetry.ends import ended


def record_history(api):
    now = time.time()
    worker = api.worker(A)
    for second in range(-200, 0):
        api.instruments.history_sampler.step(now + second)
        api.instruments.end_second(now + second)
        api.instruments.metrics.record(ended(worker), worker)


async def history(api, query=""):
    response = await api.client().get(f"/history{query}")
    assert response.status_code == 200
    return await response.get_json()


async def test_the_default_is_the_whole_fleet_for_15_minutes(api):
    record_history(api)
    body = await history(api)
    assert (body["secs"], body["step_secs"], body["metrics"]) == (900, 5, True)
    assert list(body["series"]) == list(SERIES)
    assert {len(values) for values in body["series"].values()} == {POINTS}
    assert max(filter(None, body["series"]["requests_per_sec"])) == pytest.approx(1)
    assert body["from"] + POINTS * 5 == pytest.approx(time.time(), abs=6)


async def test_a_worker_series_and_a_longer_range_can_be_selected(api):
    record_history(api)
    body = await history(api, f"?secs=21600&series=first_p50_ms,in_flight&worker={B}")
    assert (body["step_secs"], body["worker"]) == (120, B)
    assert list(body["series"]) == ["first_p50_ms", "in_flight"]
    assert set(body["series"]["first_p50_ms"]) == {None}
    body = await history(api, f"?secs=21600&series=first_p50_ms&worker={A}")
    assert any(body["series"]["first_p50_ms"])


async def test_by_worker_each_worker_has_its_own_series(api):
    record_history(api)
    a, b = (await history(api, "?by=worker&series=first_p50_ms"))["workers"]
    assert (a["url"], b["url"]) == (A, B)
    assert any(a["series"]["first_p50_ms"])
    assert not any(b["series"]["first_p50_ms"])


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("secs=901", 400, "900, 3600, 21600"),
        ("series=first", 400, "first_p50_ms"),
        ("by=model", 400, "by must be worker"),
        ("worker=http://c:1", 404, "not found"),
    ],
)
async def test_an_invalid_query_is_refused_with_the_reason(api, query, status, text):
    response = await api.client().get(f"/history?{query}")
    assert response.status_code == status
    assert text in (await response.get_json())["error"]["message"]


async def test_the_history_needs_the_key():
    assert (await build_api(entry(A), key="k").client().get("/history")).status_code == 401
