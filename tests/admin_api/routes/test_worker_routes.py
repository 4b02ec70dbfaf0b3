"""Workers over HTTP: listed, found, added, changed, revived, drained, removed."""

from urllib.parse import quote

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.admin_api import fleet_changes
from omni_proxy.upstream_http.resolver import RefusedAddress
from tests.admin_api.api_fixture import ID_A, NOW, A, B, C, build_api, call, entry, message


async def test_the_list_has_the_summary_and_the_workers_in_order(api):
    status, body, _ = await call(api, "GET", "/workers")
    assert (status, body["status"], body["total"]) == (200, "ok", 2)
    assert [record["url"] for record in body["workers"]] == [A, B]
    assert body["stats"] == {"prefill_count": 0, "decode_count": 0, "regular_count": 2}


async def test_the_list_can_be_limited_to_a_model():
    api = build_api(entry(A, model="m"), entry(B, model="n"))
    _, body, _ = await call(api, "GET", "/workers?model=n")
    assert [record["url"] for record in body["workers"]] == [B]


@pytest.mark.parametrize("name", [ID_A, A, quote(ID_A, safe=""), quote(A, safe=":/")])
async def test_a_worker_is_found_by_id_or_url_encoded_or_not(api, name):
    status, body, _ = await call(api, "GET", f"/workers/{name}")
    assert (status, body["worker_id"], body["id"], body["url"]) == (200, ID_A, ID_A, A)


@pytest.mark.parametrize("name", [f"HTTP{A[4:]}", f"{A}/", quote(f"HTTP{A[4:]}/", safe="")])
async def test_a_worker_is_found_in_every_spelling_that_would_add_it(api, name):
    status, body, _ = await call(api, "GET", f"/workers/{name}")
    assert (status, body["url"]) == (200, A)
    status, body, _ = await call(api, "DELETE", f"/workers/{name}")
    assert (status, body["worker_id"]) == (200, ID_A)


@pytest.mark.parametrize(
    ("method", "body"),
    [("GET", None), ("PUT", {"disabled": True}), ("PATCH", {"cost": 2}), ("DELETE", None)],
)
async def test_an_unknown_worker_gets_a_404(api, method, body):
    assert await message(api, method, f"/workers/{C}", body) == (404, "worker not found")


async def test_an_added_worker_is_probed_once_and_shown(api):
    status, body, headers = await call(
        api, "POST", "/workers", {"url": "HTTP://127.0.0.1:8013/", "capabilities": ["chat"]}
    )
    assert (status, body["status"]) == (200, "ok")
    assert body["worker"]["url"] == C
    assert body["worker"]["origin"] == "api"
    assert body["worker"]["capabilities"] == ["chat"]
    assert (body["worker"]["consecutive_successes"], body["worker"]["health_state"]) == (
        1,
        "unknown",
    )
    assert api.prober.probed == [C]
    assert headers["ETag"] == '"2"'


async def test_a_worker_that_was_probed_already_is_not_probed_again(api, monkeypatch):
    change = api.config_store.change

    async def change_slowly(edit, if_match=None, **kwargs):
        outcome = await change(edit, if_match)
        await api.prober.probe_once(api.worker(C))
        return outcome

    monkeypatch.setattr(api.config_store, "change", change_slowly)
    _, body, _ = await call(api, "POST", "/workers", {"url": C})
    assert body["worker"]["consecutive_successes"] == 1


async def test_the_url_of_the_query_has_precedence(api):
    status, body, _ = await call(api, "POST", f"/workers?url={C}", {"url": A})
    assert (status, body["worker"]["url"]) == (200, C)
    status, body, _ = await call(api, "POST", "/workers?worker_url=http://127.0.0.1:9")
    assert (status, body["worker"]["url"]) == (200, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "invalid JSON body"),
        (b"[]", "request body must be a JSON object"),
        (b"", "worker url is required"),
        ({"url": ""}, "worker url is required"),
        ({"url": 7}, "worker url is required"),
        ({"zebra": 1, "ant": 2}, "unsupported fields: ant, zebra"),
    ],
)
async def test_the_checks_of_a_post_have_a_fixed_order(api, body, reason):
    assert await message(api, "POST", "/workers", body) == (400, reason)
    assert api.config_store.revision == 1


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("127.0.0.1:1", "url scheme must be http or https"),
        ("ftp://h", "url scheme must be http or https"),
        ("http://h/v1", "url must be a base URL without a path"),
        ("http://u@h", "url must not contain user-info"),
        ("http://h:99999", "url port out of range"),
        ("http://169.254.1.2", "url link-local address"),
        ("http://[::ffff:169.254.169.254]", "url link-local address"),
        ("http://2852039166", "url link-local address"),
        ("unix:/run/w.sock", "url unix: workers can be named in the"),
    ],
)
async def test_an_invalid_or_refused_url_gets_a_400_with_the_reason(api, url, reason):
    status, body = await message(api, "POST", "/workers", {"url": url})
    assert status == 400
    assert body.startswith(reason)


async def test_a_name_that_resolves_to_a_refused_address_is_refused(api, monkeypatch):
    async def resolve_to_link_local(host, port):
        raise RefusedAddress(f"{host}: link-local address 169.254.0.1 is not allowed")

    monkeypatch.setattr(fleet_changes, "addresses", resolve_to_link_local)
    status, body = await message(api, "POST", "/workers", {"url": "http://sly.example:1"})
    assert (status, "169.254.0.1" in body) == (400, True)
    assert api.config_store.revision == 1


async def test_a_worker_whose_name_does_not_resolve_is_kept(api, monkeypatch):
    async def fail_to_resolve(host, port):
        raise OSError("Name or service not known")

    monkeypatch.setattr(fleet_changes, "addresses", fail_to_resolve)
    status, body, _ = await call(api, "POST", "/workers", {"url": "http://later.example:1"})
    assert (status, body["worker"]["url"]) == (200, "http://later.example:1")


async def test_a_known_url_gets_a_409_in_any_spelling(api):
    conflict = (409, "worker already registered")
    assert await message(api, "POST", "/workers", {"url": A}) == conflict
    assert await message(api, "POST", "/workers", {"url": A + "/"}) == conflict


async def test_a_put_changes_the_settings_but_not_the_health(api):
    api.healthy(A)
    status, body, headers = await call(
        api, "PUT", f"/workers/{ID_A}", {"disabled": True, "model": "m", "capabilities": ["chat"]}
    )
    record = body["worker"]
    assert (status, body["status"], headers["ETag"]) == (200, "ok", '"2"')
    assert (record["disabled"], record["routable"]) == (True, False)
    assert (record["health_state"], record["model"]) == ("healthy", "m")
    assert record["capabilities"] == ["chat"]
    _, body, _ = await call(api, "PUT", f"/workers/{ID_A}", {"disabled": False, "model": None})
    assert (body["worker"]["routable"], body["worker"]["model"]) == (True, None)
    assert api.prober.probed == []


async def test_weight_and_max_inflight_can_be_set_by_post_and_put(api):
    added = {"url": C, "weight": 3, "max_inflight": 8}
    _, body, _ = await call(api, "POST", "/workers", added)
    assert (body["worker"]["weight"], body["worker"]["max_inflight"]) == (3, 8)
    _, body, _ = await call(api, "PUT", f"/workers/{ID_A}", {"weight": 2, "max_inflight": 4})
    assert (body["worker"]["weight"], body["worker"]["max_inflight"]) == (2, 4)
    _, body, _ = await call(api, "PUT", f"/workers/{ID_A}", {"max_inflight": 0})
    assert (body["worker"]["weight"], body["worker"]["max_inflight"]) == (2, 0)
    for bad in ({"weight": 0}, {"weight": True}, {"max_inflight": -1}, {"max_inflight": None}):
        status, reason = await message(api, "PUT", f"/workers/{ID_A}", bad)
        assert (status, "must be a whole number" in reason) == (400, True)


async def test_the_operator_that_disabled_a_worker_is_recorded_until_it_is_enabled(api):
    api.healthy(A, B)
    operator = {"User-Agent": "operator-3"}
    _, body, _ = await call(api, "PUT", f"/workers/{ID_A}", {"disabled": True}, **operator)
    record = body["worker"]
    assert record["disabled_by"]["by"] == "operator-3"
    assert record["disabled_by"]["at"]
    assert record["why"] == "disabled by operator-3"
    _, body, _ = await call(api, "POST", f"/workers/{ID_A}/drain", {}, **{"User-Agent": "other"})
    assert body["worker"]["disabled_by"]["by"] == "operator-3"
    _, body, _ = await call(api, "PUT", f"/workers/{ID_A}", {"disabled": False})
    assert body["worker"]["disabled_by"] is None
    assert api.config_store.state.disabled_by == {}
    await call(api, "POST", f"/workers/{ID_A}/drain", {}, **operator)
    assert api.config_store.state.disabled_by[A].by == "operator-3"
    await call(api, "DELETE", f"/workers/{ID_A}")
    assert api.config_store.state.disabled_by == {}


@pytest.mark.parametrize(
    ("fields", "who"),
    [
        ({"User-Agent": "curl/8.5.0 (x86_64) libcurl/8.5.0"}, "curl/8.5.0"),
        ({"User-Agent": "Mozilla/5.0 (X11)", "Origin": "http://localhost"}, "dashboard"),
        ({"User-Agent": "Mozilla/5.0 (X11)", "Sec-Fetch-Site": "same-origin"}, "dashboard"),
        ({"User-Agent": "Mozilla/5.0 (X11)"}, "browser"),
        ({"User-Agent": ""}, ""),
    ],
)
async def test_a_caller_is_recorded_as_a_page_or_the_first_product(api, fields, who):
    api.healthy(A)
    await call(api, "PUT", f"/workers/{ID_A}", {"disabled": True}, **fields)
    assert api.config_store.state.disabled_by[A].by == who


async def test_the_operator_that_disabled_a_worker_is_shown_only_with_the_key():
    api = build_api(entry(A), key="k")
    api.healthy(A)
    key = {"Authorization": "Bearer k", "User-Agent": "operator-3"}
    await call(api, "PUT", f"/workers/{ID_A}", {"disabled": True}, **key)
    for headers, who in ((key, "operator-3"), ({}, None)):
        _, record, _ = await call(api, "GET", f"/workers/{ID_A}", **headers)
        assert record["disabled_by"]["by"] == who
        assert record["why"] == f"disabled by {who or 'an operator'}"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"nonsense", "invalid JSON body"),
        (b"", "at least one worker field is required"),
        ({"weird": 1}, "unsupported fields: weird"),
        ({"is_dead": "yes"}, "is_dead must be a boolean"),
        ({"disabled": 1}, "disabled must be a boolean"),
    ],
)
async def test_a_put_is_validated_before_its_worker_is_looked_up(api, body, reason):
    assert await message(api, "PUT", f"/workers/{ID_A}", body) == (400, reason)
    assert await message(api, "PUT", "/workers/unknown", body) == (400, reason)


async def test_a_refused_put_changes_nothing(api):
    body = {"disabled": True, "is_dead": True, "capabilities": ["fly"]}
    assert (await message(api, "PUT", f"/workers/{ID_A}", body))[0] == 400
    assert not api.worker().disabled
    assert api.worker().health.state == "unknown"


async def test_a_dead_worker_stays_dead_until_it_is_revived_and_probed_once(api):
    api.healthy(A)
    _, body, _ = await call(api, "PUT", f"/workers/{ID_A}", {"is_dead": True})
    assert (body["worker"]["health_state"], body["worker"]["status"]) == ("dead", "failed")
    assert api.prober.probed == []
    _, body, _ = await call(api, "PUT", f"/workers/{ID_A}", {"is_dead": False})
    record = body["worker"]
    assert (record["health_state"], record["consecutive_successes"]) == ("unknown", 1)
    assert api.prober.probed == [A]


async def test_reviving_a_live_worker_resets_its_counters_and_probes_it(api):
    worker = api.worker()
    api.fleet.observe_probe(worker, status=500, error="x", at=NOW, epoch=worker.health.epoch)
    _, body, _ = await call(api, "PUT", f"/workers/{ID_A}", {"is_dead": False})
    assert body["worker"]["consecutive_failures"] == 0
    assert api.prober.probed == [A]


async def test_a_deleted_worker_can_be_added_again_with_fresh_state(api):
    api.healthy(A)
    status, body, headers = await call(api, "DELETE", f"/workers/{ID_A}")
    assert (status, body) == (200, {"status": "ok", "worker_id": ID_A})
    assert headers["ETag"] == '"2"'
    assert api.fleet.find(A) is None
    _, body, _ = await call(api, "POST", "/workers", {"url": A})
    assert (body["worker"]["health_state"], body["worker"]["origin"]) == ("unknown", "file")


async def test_the_last_worker_may_be_deleted(api):
    for url in (A, B):
        assert (await call(api, "DELETE", f"/workers/{url}"))[0] == 200
    assert (await call(api, "GET", "/workers"))[1]["total_workers"] == 0


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/workers", {"url": C}),
        ("PUT", f"/workers/{A}", {"disabled": True}),
        ("PUT", f"/workers/{A}", {"is_dead": True}),
        ("PATCH", f"/workers/{A}", {"cost": 2}),
        ("DELETE", f"/workers/{A}", None),
    ],
)
async def test_a_change_for_another_revision_gets_a_412(api, method, path, body):
    status, content, headers = await call(api, method, path, body, **{"If-Match": '"7"'})
    assert (status, content["error"]["code"]) == (412, "precondition_failed")
    assert headers["ETag"] == '"1"'
    assert (api.fleet.find(C), api.worker().disabled) == (None, False)
    assert api.worker().health.state == "unknown"
    assert (await call(api, method, path, body, **{"If-Match": "1"}))[0] in (200, 202)


LONE_SURROGATE = "\ud800"


@pytest.mark.parametrize(
    "body", [{"model": LONE_SURROGATE}, {"labels": {"a": LONE_SURROGATE}}, {LONE_SURROGATE: 1}]
)
async def test_a_lone_surrogate_is_refused_and_the_list_stays_readable(api, body):
    status, content, _ = await call(api, "POST", "/workers", {"url": C, **body})
    assert (status, content["error"]["code"]) == (400, "invalid_json")
    assert (await call(api, "GET", "/workers"))[0] == 200


async def test_a_lone_surrogate_in_a_health_body_does_not_break_the_list(api):
    api.worker(A).health_body = {"name": LONE_SURROGATE}
    status, body, _ = await call(api, "GET", "/workers")
    assert (status, body["workers"][0]["health"]) == (200, {"name": LONE_SURROGATE})


WORKER = f"/workers/{A}"


@pytest.fixture
async def running(api, nursery):
    """The API with its drain service running; A is busy."""
    api.healthy(A, B)
    api.worker(A).in_flight = 1
    await nursery.start(api.drains.run)
    return api


async def draining(api):
    return (await (await api.client().get(WORKER)).get_json())["draining"]


async def drain(api, **body):
    response = await api.client().post(f"{WORKER}/drain", json=body)
    return response.status_code, await response.get_json()


async def test_a_drain_stops_new_requests_and_reports_those_in_flight(running):
    status, body = await drain(running, timeout_secs=60)
    assert (status, body["status"]) == (202, "draining")
    assert (body["worker"]["disabled"], body["worker"]["routable"]) == (True, False)
    shown = await draining(running)
    assert (shown["state"], shown["in_flight"]) == ("draining", 1)
    assert shown["since"] < shown["deadline"]
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while (await draining(running))["state"] != "drained":  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert running.fleet.find(A).disabled


async def test_an_idle_worker_is_drained_at_once(running):
    running.worker(A).in_flight = 0
    status, body = await drain(running)
    assert (status, body["status"]) == (200, "drained")


async def test_zero_means_no_deadline_and_no_timeout_means_the_configured_one(running):
    await drain(running, timeout_secs=0)
    assert (await draining(running))["deadline"] is None
    await drain(running)
    assert running.drains.secs_left(running.worker(A)) == pytest.approx(120, abs=5)


async def test_enabling_a_worker_ends_its_drain(running):
    await drain(running)
    await running.client().put(WORKER, json={"disabled": False})
    assert await draining(running) is None
    assert running.worker(A).routable


@pytest.mark.parametrize("secs", [-1, "soon", True, [], 1e12, "nan", {}])
async def test_an_invalid_timeout_is_refused_and_changes_nothing(running, secs):
    status, body = await drain(running, timeout_secs=secs)
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert not running.worker(A).disabled


async def test_a_drain_of_an_unknown_worker_gets_a_404(running):
    response = await running.client().post("/workers/unknown/drain")
    assert response.status_code == 404
    assert (await running.client().delete("/workers/unknown?drain=true")).status_code == 404


async def test_a_removal_waits_for_requests_in_flight(running, nursery):
    responses = []

    async def remove():
        responses.append(await running.client().delete(f"{WORKER}?drain=true&timeout_secs=60"))

    nursery.start_soon(remove)
    await wait_all_tasks_blocked(0.01)
    assert running.fleet.find(A).disabled
    assert not responses
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while not responses:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert running.fleet.find(A) is None
    assert (await responses[0].get_json())["drained"] is True


async def test_a_removal_at_its_deadline_reports_requests_in_flight(running):
    with trio.fail_after(30):
        response = await running.client().delete(f"{WORKER}?drain=true&timeout_secs=0.05")
    assert (await response.get_json())["drained"] is False
    assert running.fleet.find(A) is None


async def test_prefer_respond_async_returns_during_the_drain(running):
    client = running.client()
    response = await client.delete(f"{WORKER}?drain=true", headers={"Prefer": "respond-async"})
    assert (response.status_code, (await response.get_json())["status"]) == (202, "accepted")
    assert (await draining(running))["state"] == "draining"
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while running.fleet.find(A):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_plain_removal_does_not_wait(running):
    response = await running.client().delete(WORKER)
    assert "drained" not in await response.get_json()
    assert running.fleet.find(A) is None


async def test_enabling_a_draining_worker_cancels_the_removal(running, nursery):
    responses = []

    async def remove():
        responses.append(await running.client().delete(f"{WORKER}?drain=true"))

    nursery.start_soon(remove)
    await wait_all_tasks_blocked(0.01)
    await running.client().put(WORKER, json={"disabled": False})
    with trio.fail_after(30):
        while not responses:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert responses[0].status_code == 409
    assert (await responses[0].get_json())["error"]["code"] == "drain_cancelled"
    assert running.worker(A).routable


async def test_a_removal_continues_after_its_caller_disconnects(running):
    async with trio.open_nursery() as callers:
        callers.start_soon(running.client().delete, f"{WORKER}?drain=true")
        await wait_all_tasks_blocked(0.01)
        assert running.fleet.find(A).disabled
        callers.cancel_scope.cancel()
    assert running.fleet.find(A) is not None
    running.worker(A).in_flight = 0
    with trio.fail_after(30):
        while running.fleet.find(A):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_drain_must_be_true_or_false(running):
    response = await running.client().delete(f"{WORKER}?drain=maybe")
    assert response.status_code == 400
    assert running.fleet.find(A) is not None
