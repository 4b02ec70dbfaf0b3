import pytest

from omni_proxy.config.schema import AdminConfig, DisaggregationConfig, RoutingConfig
from omni_proxy.weight_sync.protocol.journal import PauseRecord
from tests.admin_api.api_fixture import NOW, A, B, build_api, entry

PAUSE = PauseRecord(
    at="2026-11-21T05:44:28+00:00", by="trainer from 10.0.0.3", path="/pause_generation",
    mode="retract",
)  # fmt: skip
PAUSED = {"at": PAUSE.at, "by": PAUSE.by, "path": PAUSE.path, "mode": "retract"}


async def get(api, path):
    response = await api.client().get(path)
    return response.status_code, await response.get_json()


@pytest.fixture
def paused():
    """An API with two routable workers whose engines are paused."""
    api = build_api(entry(A), entry(B))
    api.healthy(A, B)
    for url in (A, B):
        api.operations.journal.record_pause(url, PAUSE)
    return api


async def test_a_paused_fleet_is_not_ready_and_names_the_resume_command(paused):
    status, body = await get(paused, "/ready")
    assert (status, body["status"], body["reason"]) == (503, "not_ready", "paused")
    assert "omni-proxy weights continue" in body["message"]
    assert PAUSE.at in body["message"]
    assert (await get(paused, "/readiness"))[0] == 503
    assert (await get(paused, "/health"))[0] == 200


async def test_status_feed_weights_and_metrics_report_the_pause(paused):
    _, status = await get(paused, "/status")
    assert (status["ready"], status["reason"]) == (False, "paused")
    assert status["paused"] == {A: PAUSED, B: PAUSED}
    _, feed = await get(paused, "/feed?once=true")
    assert (feed["ready"], feed["reason"]) == (False, "paused")
    assert [row["paused"] for row in feed["fleet"]] == [PAUSED, PAUSED]
    assert (await get(paused, "/weights"))[1]["paused"] == {A: PAUSED, B: PAUSED}
    metrics = await (await paused.client().get("/metrics")).get_data(as_text=True)
    assert "omni_proxy_ready 0.0" in metrics
    assert "omni_proxy_workers_paused 2.0" in metrics
    paused_at = f'omni_proxy_worker_paused_timestamp_seconds{{worker="{A}"}} 1.795'
    assert paused_at in metrics


async def test_one_resumed_worker_makes_the_proxy_ready(paused):
    assert paused.operations.journal.forget_pauses([A])
    assert (await get(paused, "/ready"))[0] == 200
    _, feed = await get(paused, "/feed?once=true")
    assert [row["paused"] for row in feed["fleet"]] == [None, PAUSED]


async def test_workers_that_are_held_for_the_pause_make_the_proxy_not_ready_as_paused():
    api = build_api(entry(A), routing=RoutingConfig(while_paused="hold"))
    api.healthy(A)
    api.operations.journal.record_pause(A, PAUSE)
    api.operations.journal.cordon_paused(A)
    assert (await get(api, "/ready"))[1]["reason"] == "paused"
    _, body = await get(api, "/workers")
    why = body["workers"][0]["why"]
    assert why.startswith(f"paused since {PAUSE.at} by trainer from 10.0.0.3")
    assert "omni-proxy weights continue" in why


async def test_a_pause_is_not_the_reason_if_the_workers_are_dead(paused):
    for url in (A, B):
        paused.fleet.mark_dead(paused.worker(url), NOW)
    assert (await get(paused, "/ready"))[1]["reason"] == "no_routable_worker"


async def test_without_a_key_the_origin_of_a_pause_is_hidden(paused):
    keyed = build_api(entry(A), admin=AdminConfig(api_key="sesame"))
    keyed.healthy(A)
    keyed.operations.journal.record_pause(A, PAUSE)
    _, body = await get(keyed, "/ready")
    assert body["reason"] == "paused"
    assert "10.0.0.3" not in str(body)
    keyed.operations.journal.cordon_paused(A)
    paths = ("/workers", f"/workers/{keyed.worker().id}")
    for path in paths:
        _, body = await get(keyed, path)
        assert "paused" in str(body)
        assert "10.0.0.3" not in str(body)
    for path in paths:
        bearer = {"Authorization": "Bearer sesame"}
        response = await keyed.client().get(path, headers=bearer)
        assert "10.0.0.3" in await response.get_data(as_text=True)


@pytest.mark.parametrize(
    ("connector", "fallback", "healthy", "reason"),
    [
        ("sglang", "decode", (A, B), None),
        ("sglang", "decode", (A,), "no_pair"),
        ("sglang", "decode", (B,), "no_pair"),
        ("nixl", "decode", (B,), None),
        ("nixl", "refuse", (B,), "no_pair"),
        ("nixl", "decode", (A,), "no_pair"),
        ("nixl", "decode", (), "no_routable_worker"),
    ],
)
async def test_prefill_and_decode_workers_are_ready_as_a_pair(connector, fallback, healthy, reason):
    routing = RoutingConfig(disaggregation=DisaggregationConfig(fallback=fallback))
    api = build_api(
        entry(A, role="prefill", kv_connector=connector),
        entry(B, role="decode", kv_connector=connector),
        routing=routing,
    )
    api.healthy(*healthy)
    status, body = await get(api, "/ready")
    assert (status, body.get("reason")) == (503 if reason else 200, reason)
    assert (await get(api, "/health"))[0] == status


async def test_a_pair_with_two_weight_versions_is_healthy_but_not_ready():
    api = build_api(entry(A, role="prefill"), entry(B, role="decode"))
    api.healthy(A, B)
    api.fleet.set_version(api.worker(A), "v2", 2)
    assert (await get(api, "/ready"))[1]["reason"] == "no_pair"
    assert (await get(api, "/health"))[0] == 200


async def test_a_paused_pair_is_not_ready_because_of_the_pause():
    api = build_api(entry(A, role="prefill"), entry(B, role="decode"))
    api.healthy(A, B)
    api.operations.journal.record_pause(A, PAUSE)
    assert (await get(api, "/ready"))[1]["reason"] == "paused"
