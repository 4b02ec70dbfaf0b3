from tests.admin_api.api_fixture import A, B, build_api, entry


async def test_status_reports_the_parts_of_the_process(api):
    body = await (await api.client().get("/status")).get_json()
    assert list(body)[:5] == ["version", "pid", "started_at", "uptime_secs", "listeners"]
    assert body["listeners"] == ["http://127.0.0.1:30000"]
    assert body["fleet"]["total_workers"] == 2
    assert body["supervisors"] == [{"name": "data_plane", "state": "running"}]
    assert body["launch"] == []
    assert body["watchdog"]["stalls"] == 0
    assert body["data_plane"] == body["door"]


async def test_status_has_the_mode_of_each_cache_with_events():
    api = build_api(entry(A, kv_events="auto"), entry(B))
    body = await (await api.client().get("/status")).get_json()
    assert body["kv_modes"] == {A: {"kv_mode": "off", "kv_reason": ""}}
    api.worker(A).kv_mode, api.worker(A).kv_reason = "degraded", "batches 3 to 4 were lost"
    body = await (await api.client().get("/status")).get_json()
    assert body["kv_modes"][A] == {"kv_mode": "degraded", "kv_reason": "batches 3 to 4 were lost"}
