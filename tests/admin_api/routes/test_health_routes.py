import time

import pytest

from tests.admin_api.api_fixture import NOW, A, B, build_api, entry


async def test_live_needs_no_worker():
    response = await build_api().client().get("/live")
    assert response.status_code == 200
    assert await response.get_json() == {"status": "alive"}


async def test_ready_and_health_depend_on_a_routable_worker(api):
    client = api.client()
    for path, name in (("/ready", "not_ready"), ("/health", "unhealthy")):
        response = await client.get(path)
        body = await response.get_json()
        assert (response.status_code, body["status"]) == (503, name)
        assert (body["routable_workers"], body["unknown_workers"], body["total_workers"]) == (
            0,
            2,
            2,
        )
    unready = await (await client.get("/ready")).get_json()
    assert unready["reason"] == "no_routable_worker"
    api.healthy(A)
    assert "reason" not in await (await client.get("/ready")).get_json()
    for path, name in (("/ready", "ready"), ("/health", "healthy")):
        response = await client.get(path)
        body = await response.get_json()
        assert (response.status_code, body["status"], body["routable_workers"]) == (200, name, 1)
        assert [record["url"] for record in body["workers"]] == [A, B]


async def statuses(api):
    client = api.client()
    return [(await client.get(path)).status_code for path in ("/health", "/readiness", "/ready")]


@pytest.mark.parametrize(("dialect", "status"), [("sglang", 200), ("omni", 503)])
async def test_without_workers_so_far_only_the_sglang_dialect_is_healthy(dialect, status):
    api = build_api(startup={"dialect": dialect})
    assert await statuses(api) == [status, 503, 503]
    await api.client().post("/workers", json={"url": A})
    api.fleet.apply([], NOW)
    assert await statuses(api) == [503] * 3


async def test_a_router_is_unhealthy_until_each_given_worker_was_probed():
    api = build_api(entry(A), entry(B), startup={"dialect": "sglang", "flag_urls": (A, B)})
    api.healthy(A)
    assert await statuses(api) == [503] * 3
    body = await (await api.client().get("/ready")).get_json()
    assert body["reason"] == "first_probes"
    (worker,) = [worker for worker in api.fleet.workers if worker.url == B]
    api.fleet.observe_probe(worker, status=200, error=None, at=NOW, epoch=0)
    assert await statuses(api) == [503] * 3  # one good probe is not enough for "healthy"
    api.healthy(B)
    assert await statuses(api) == [200] * 3


async def test_a_given_worker_with_a_failed_first_probe_delays_no_readiness():
    api = build_api(entry(A), entry(B), startup={"dialect": "sglang", "flag_urls": (A, B)})
    api.healthy(A)
    api.fleet.observe_probe(api.worker(B), status=None, error="refused", at=NOW, epoch=0)
    assert await statuses(api) == [200] * 3


async def test_the_wait_for_a_given_worker_is_at_most_the_time_of_a_probe():
    startup = {"dialect": "sglang", "flag_urls": (A, B)}
    earlier = {"started": time.monotonic() - 6}
    api = build_api(entry(A), entry(B), startup=startup, services=earlier)
    api.healthy(A)
    assert await statuses(api) == [200] * 3


@pytest.mark.parametrize(
    "startup", [{"flag_urls": (A, B)}, {"dialect": "sglang", "flag_urls": (A,)}]
)
async def test_one_healthy_worker_is_enough_unless_a_router_was_given_others(startup):
    api = build_api(entry(A), entry(B), startup=startup)
    api.healthy(A)
    assert await statuses(api) == [200] * 3


async def test_health_reports_admission_and_voice_routing(api):
    body = await (await api.client().get("/health")).get_json()
    assert set(body["admission"]) == {"inflight", "max_inflight", "peak_inflight", "rejected_total"}
    assert body["voice_routing"]["registry_state"] == "unassigned"


async def test_ready_is_503_during_shutdown(api):
    api.healthy(A)
    api.leaving = True
    response = await api.client().get("/ready")
    assert response.status_code == 503
    body = await response.get_json()
    assert (body["status"], body["reason"]) == ("not_ready", "leaving")
    api.leaving, api.data_plane.draining = False, True
    assert (await api.client().get("/ready")).status_code == 503
    assert (await api.client().get("/health")).status_code == 200


@pytest.mark.parametrize("hold", ["updating", "paused", "uncertain"])
async def test_a_weight_operation_affects_ready_but_not_health(hold):
    api = build_api(entry(A))
    api.healthy(A)
    api.fleet.cordon(api.worker(), hold)
    assert (await api.client().get("/ready")).status_code == 503
    assert (await api.client().get("/health")).status_code == 200


async def test_any_other_hold_affects_health_too():
    api = build_api(entry(A))
    api.healthy(A)
    api.fleet.cordon(api.worker(), "starting")
    assert (await api.client().get("/health")).status_code == 503


async def test_a_proxy_whose_workers_are_all_disabled_is_unhealthy():
    api = build_api(entry(A, disabled=True))
    api.healthy(A)
    assert (await api.client().get("/health")).status_code == 503


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/status", "/workers", "/config"])
async def test_head_answers_like_get(api, path):
    client = api.client()
    head, get = await client.head(path), await client.get(path)
    assert head.status_code == get.status_code


@pytest.mark.parametrize("path", ["/ready", "/health"])
async def test_if_a_key_is_set_addresses_are_shown_only_with_it(path):
    api = build_api(entry(A), key="s3cret")
    without_key = await (await api.client().get(path)).get_json()
    with_key = await (
        await api.client().get(path, headers={"Authorization": "Bearer s3cret"})
    ).get_json()
    assert A not in str(without_key)
    assert (without_key["total_workers"], "workers" in without_key) == (1, False)
    assert with_key["workers"][0]["url"] == A


async def test_a_dead_worker_is_counted_as_dead(api):
    api.fleet.mark_dead(api.worker(), NOW)
    body = await (await api.client().get("/health")).get_json()
    assert (body["dead_workers"], body["unknown_workers"]) == (1, 1)
