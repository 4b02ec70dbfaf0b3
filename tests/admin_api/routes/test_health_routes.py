import time

import pytest

from tests.admin_api.house import NOW, A, B, build_house, entry


async def test_live_needs_no_worker():
    answer = await build_house().client().get("/live")
    assert answer.status_code == 200
    assert await answer.get_json() == {"status": "alive"}


async def test_ready_and_health_follow_the_first_routable_worker(house):
    client = house.client()
    for path, word in (("/ready", "not_ready"), ("/health", "unhealthy")):
        answer = await client.get(path)
        body = await answer.get_json()
        assert (answer.status_code, body["status"]) == (503, word)
        assert (body["routable_workers"], body["unknown_workers"], body["total_workers"]) == (
            0,
            2,
            2,
        )
    unready = await (await client.get("/ready")).get_json()
    assert unready["reason"] == "no_routable_worker"
    house.healthy(A)
    assert "reason" not in await (await client.get("/ready")).get_json()
    for path, word in (("/ready", "ready"), ("/health", "healthy")):
        answer = await client.get(path)
        body = await answer.get_json()
        assert (answer.status_code, body["status"], body["routable_workers"]) == (200, word, 1)
        assert [record["url"] for record in body["workers"]] == [A, B]


async def statuses(house):
    client = house.client()
    return [(await client.get(path)).status_code for path in ("/health", "/readiness", "/ready")]


@pytest.mark.parametrize(("dialect", "status"), [("sglang", 200), ("omni", 503)])
async def test_a_router_that_waits_for_its_first_worker_is_well_but_not_ready(dialect, status):
    house = build_house(rooms={"dialect": dialect})
    assert await statuses(house) == [status, 503, 503]
    await house.client().post("/workers", json={"url": A})
    house.fleet.apply([], NOW)
    assert await statuses(house) == [503] * 3


async def test_a_router_is_not_well_before_each_given_worker_was_probed():
    house = build_house(entry(A), entry(B), rooms={"dialect": "sglang", "given": (A, B)})
    house.healthy(A)
    assert await statuses(house) == [503] * 3
    told = await (await house.client().get("/ready")).get_json()
    assert told["reason"] == "first_probes"
    (worker,) = [worker for worker in house.fleet.workers if worker.url == B]
    house.fleet.observe_probe(worker, status=200, error=None, at=NOW, epoch=0)
    assert await statuses(house) == [503] * 3  # good so far, and not believed yet
    house.healthy(B)
    assert await statuses(house) == [200] * 3


async def test_a_given_worker_whose_first_probe_is_bad_keeps_nobody_waiting():
    house = build_house(entry(A), entry(B), rooms={"dialect": "sglang", "given": (A, B)})
    house.healthy(A)
    house.fleet.observe_probe(house.worker(B), status=None, error="refused", at=NOW, epoch=0)
    assert await statuses(house) == [200] * 3


async def test_a_given_worker_is_waited_for_no_longer_than_a_probe_takes():
    rooms = {"dialect": "sglang", "given": (A, B), "started": time.monotonic() - 6}
    house = build_house(entry(A), entry(B), rooms=rooms)
    house.healthy(A)
    assert await statuses(house) == [200] * 3


@pytest.mark.parametrize("rooms", [{"given": (A, B)}, {"dialect": "sglang", "given": (A,)}])
async def test_the_first_worker_opens_where_no_other_was_given_to_a_router(rooms):
    house = build_house(entry(A), entry(B), rooms=rooms)
    house.healthy(A)
    assert await statuses(house) == [200] * 3


async def test_health_tells_admission_and_voice_routing(house):
    body = await (await house.client().get("/health")).get_json()
    assert set(body["admission"]) == {"inflight", "max_inflight", "peak_inflight", "rejected_total"}
    assert body["voice_routing"]["registry_state"] == "unassigned"


async def test_ready_says_no_while_the_program_leaves(house):
    house.healthy(A)
    house.leaving = True
    answer = await house.client().get("/ready")
    assert answer.status_code == 503
    told = await answer.get_json()
    assert (told["status"], told["reason"]) == ("not_ready", "leaving")
    house.leaving, house.door.draining = False, True
    assert (await house.client().get("/ready")).status_code == 503
    assert (await house.client().get("/health")).status_code == 200


@pytest.mark.parametrize("hold", ["updating", "paused", "uncertain"])
async def test_a_weight_operation_turns_ready_off_but_not_health(hold):
    house = build_house(entry(A))
    house.healthy(A)
    house.fleet.cordon(house.worker(), hold)
    assert (await house.client().get("/ready")).status_code == 503
    assert (await house.client().get("/health")).status_code == 200


async def test_another_hold_turns_health_off_too():
    house = build_house(entry(A))
    house.healthy(A)
    house.fleet.cordon(house.worker(), "starting")
    assert (await house.client().get("/health")).status_code == 503


async def test_disabled_workers_alone_are_no_health():
    house = build_house(entry(A, disabled=True))
    house.healthy(A)
    assert (await house.client().get("/health")).status_code == 503


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/status", "/workers", "/config"])
async def test_head_answers_like_get(house, path):
    client = house.client()
    head, get = await client.head(path), await client.get(path)
    assert head.status_code == get.status_code


@pytest.mark.parametrize("path", ["/ready", "/health"])
async def test_with_a_key_only_its_holder_sees_addresses(path):
    house = build_house(entry(A), key="s3cret")
    stranger = await (await house.client().get(path)).get_json()
    holder = await (
        await house.client().get(path, headers={"Authorization": "Bearer s3cret"})
    ).get_json()
    assert A not in str(stranger)
    assert (stranger["total_workers"], "workers" in stranger) == (1, False)
    assert holder["workers"][0]["url"] == A


async def test_status_tells_what_runs(house):
    body = await (await house.client().get("/status")).get_json()
    assert list(body)[:5] == ["version", "pid", "started_at", "uptime_secs", "listeners"]
    assert body["listeners"] == ["http://127.0.0.1:30000"]
    assert body["fleet"]["total_workers"] == 2
    assert body["supervisors"] == [{"name": "door", "state": "running"}]
    assert body["launch"] == []
    assert body["watchdog"]["stalls"] == 0
    assert body["data_plane"] == body["door"]


async def test_an_unknown_path_is_a_json_404_with_detail(house):
    answer = await house.client().get("/nowhere")
    body = await answer.get_json()
    assert (answer.status_code, body["detail"]) == (404, "Not Found")
    assert set(body["error"]) == {"message", "type", "code"}


async def test_a_wrong_method_is_a_json_405_that_names_the_right_ones(house):
    answer = await house.client().delete("/live")
    body = await answer.get_json()
    assert (answer.status_code, body["detail"]) == (405, "Method Not Allowed")
    assert "GET" in answer.headers["Allow"]
    assert "error" in body


async def test_a_fault_of_ours_is_a_json_500(house, monkeypatch):
    def broken() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(house.door, "admission", broken)
    answer = await house.client().get("/health")
    body = await answer.get_json()
    assert answer.status_code == 500
    assert body["error"]["code"] == "internal_server_error"
    assert "secret" not in str(body)


async def test_a_dead_worker_is_counted_as_such(house):
    house.fleet.mark_dead(house.worker(), NOW)
    body = await (await house.client().get("/health")).get_json()
    assert (body["dead_workers"], body["unknown_workers"]) == (1, 1)


async def test_a_path_that_is_nearly_one_of_ours_is_told_as_it_came():
    told = await (await build_house().client().post("//v1/chat/completions")).get_json()
    assert told["error"]["message"] == (
        "Not Found: POST //v1/chat/completions; did you mean /v1/chat/completions?"
    )
