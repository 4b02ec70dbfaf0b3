import httpx
import pytest
import trio

from omni_proxy.admin_api.fleet_changes import ROUTABLE_SECS
from omni_proxy.config.overlay import with_deleted
from tests.admin_api.api_fixture import NOW, A, B, C, build_api, entry


async def call_route(api, method, path, **headers):
    response = await getattr(api.client(), method)(path, headers=headers)
    return response.status_code, (await response.get_data()).decode(), response


@pytest.mark.parametrize("query", [C, "http%3A%2F%2F127.0.0.1%3A8013"])
async def test_a_healthy_worker_is_added_with_the_text_that_scripts_expect(api, engines, query):
    engines.set_reply(C, "/health", {"status": "ok"})
    status, text, response = await call_route(api, "post", f"/add_worker?url={query}")
    assert (status, text) == (200, f"Successfully added worker: {C}")
    assert response.content_type.startswith("text/plain")
    assert api.worker(C).routable
    assert api.worker(C).origin == "api"


async def test_the_success_text_repeats_the_url_as_sent(api, engines):
    engines.set_reply(C, "/health", {})
    _, text, _ = await call_route(api, "post", f"/add_worker?url={C}/")
    assert text == f"Successfully added worker: {C}/"
    assert api.fleet.find(C)


async def test_a_url_with_a_rank_adds_the_worker_with_all_its_ranks(api, engines):
    engines.set_reply(C, "/health", {})
    status, text, _ = await call_route(api, "post", f"/add_worker?url={C}@1")
    assert (status, text) == (200, f"Successfully added worker: {C}@1")
    assert api.worker(C).ranks == "auto"
    status, text, _ = await call_route(api, "post", f"/remove_worker?url={C}@1")
    assert status == 400
    assert "is not a worker" in text
    assert api.fleet.find(C)


async def test_a_worker_is_added_only_when_it_is_healthy(api, engines, autojump_clock):
    engines.replies[C, "/health"] = [httpx.ConnectError("refused"), (503, b"loading"), (200, b"{}")]
    before = trio.current_time()
    status, _, _ = await call_route(api, "post", f"/add_worker?url={C}")
    assert status == 200
    assert len(engines.requests) == 3
    assert trio.current_time() > before


async def test_a_worker_that_stays_unhealthy_is_refused_with_the_reason(
    api, engines, autojump_clock
):
    engines.set_reply(C, "/health", b"loading", status=503)
    status, text, _ = await call_route(api, "post", f"/add_worker?url={C}&timeout_secs=3")
    assert status == 400
    assert "did not become healthy within 3 s: status=503" in text
    assert api.fleet.find(C) is None


async def test_a_refused_connection_is_reported_with_its_error(api, engines, autojump_clock):
    engines.replies[C, "/health"] = [httpx.ConnectError("Connection refused")]
    _, text, _ = await call_route(api, "post", f"/add_worker?url={C}&timeout_secs=3")
    assert "within 3 s: ConnectError: Connection refused" in text


async def test_a_silent_worker_is_reported_as_not_answering(
    api, engines, monkeypatch, autojump_clock
):
    async def never(request):
        await trio.sleep_forever()

    monkeypatch.setattr(engines, "answer", never)
    _, text, _ = await call_route(api, "post", f"/add_worker?url={C}&timeout_secs=3")
    assert "did not become healthy within 3 s: it has not answered" in text


async def test_of_two_concurrent_additions_one_gets_the_success_text(api, engines, autojump_clock):
    loading, healthy = (503, b"loading"), (200, b"{}")
    engines.replies[C, "/health"] = [loading, loading, healthy, healthy]
    responses = []

    async def add():
        responses.append((await call_route(api, "post", f"/add_worker?url={C}"))[:2])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(add)
        nursery.start_soon(add)
    (success, conflict) = sorted(responses)
    assert success == (200, f"Successfully added worker: {C}")
    assert conflict[0] == 400
    assert "Worker URL already exists" in conflict[1]


@pytest.mark.parametrize("event", ["dies", "is removed"])
async def test_waiting_for_a_new_worker_ends_when_its_probes_end(
    api, engines, monkeypatch, autojump_clock, event
):
    engines.set_reply(C, "/health", {"status": "ok"})
    probed = []

    async def probe_once(worker):
        probed.append(worker)
        assert len(probed) < 10, "probed without end"
        if event == "dies":
            api.fleet.mark_dead(worker, NOW)
        else:
            state = with_deleted(api.config_store.state, api.config_store.config, C)
            await api.config_store.change(lambda *_: state)
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(api.prober, "probe_once", probe_once)
    status, _, _ = await call_route(api, "post", f"/add_worker?url={C}")
    assert status == 200
    assert len(probed) == 1


async def test_probes_of_a_new_worker_have_pauses_and_end_if_it_never_becomes_routable(
    api, engines, monkeypatch, autojump_clock
):
    engines.set_reply(C, "/health", {"status": "ok"})

    async def probe_once(worker):
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(api.prober, "probe_once", probe_once)
    before = trio.current_time()
    status, _, _ = await call_route(api, "post", f"/add_worker?url={C}")
    assert status == 200
    assert trio.current_time() - before >= ROUTABLE_SECS


async def test_a_concurrent_second_removal_succeeds_too(api, monkeypatch):
    change = api.config_store.change

    async def change_after_a_removal(edit, *args, **kwargs):
        await change(lambda state, config: with_deleted(state, config, B))
        return await change(edit, *args, **kwargs)

    monkeypatch.setattr(api.config_store, "change", change_after_a_removal)
    status, text, _ = await call_route(api, "post", f"/remove_worker?url={B}")
    assert (status, text) == (200, f"Successfully removed worker: {B}")


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("", "missing field `url`"),
        ("?url=", "missing field `url`"),
        (f"?url={A}", "Worker URL already exists"),
        ("?url=ftp://h:1", "url scheme must be http or https"),
        ("?url=http://169.254.169.254", "url link-local address 169.254.169.254 is not allowed"),
        (f"?url={C}&timeout_secs=0", "timeout_secs must be a number"),
        (f"?url={C}&timeout_secs=nan", "timeout_secs must be a number"),
        (f"?url={C}&api_key=secret", "api_key is not taken over HTTP"),
    ],
)
async def test_an_invalid_addition_gets_its_error_and_changes_nothing(api, engines, query, text):
    status, body, _ = await call_route(api, "post", f"/add_worker{query}")
    assert status == 400
    assert text in body
    assert "secret" not in body
    assert [worker.url for worker in api.fleet.workers] == [A, B]


async def test_removing_a_worker_twice_succeeds(api, engines):
    for _ in range(2):
        status, text, _ = await call_route(api, "post", f"/remove_worker?url={B}")
        assert (status, text) == (200, f"Successfully removed worker: {B}")
    response = await api.client().get("/list_workers")
    assert await response.get_json() == {"urls": [A]}


async def test_changes_need_the_key_and_the_list_does_not(engines):
    api = build_api(entry(A), key="k")
    for route in ("/add_worker", "/remove_worker"):
        assert (await call_route(api, "post", f"{route}?url={A}"))[0] == 401
    assert (await call_route(api, "get", "/list_workers"))[0] == 200
    path = f"/remove_worker?url={A}"
    assert (await call_route(api, "post", path, Authorization="Bearer k"))[0] == 200


async def post_json(api, path, body):
    response = await api.client().post(path, json=body)
    return response.status_code, await response.get_json()


@pytest.mark.parametrize("key", ["url", "worker_url"])
async def test_adding_and_removing_by_json_body_is_idempotent(api, engines, key):
    engines.set_reply(C, "/health", {})
    for _ in range(2):
        status, body = await post_json(api, "/add_worker", {key: C})
        assert (status, body["status"]) == (200, "success")
        assert body["worker_urls"][C] == 0
    assert api.worker(C).routable
    for _ in range(2):
        status, body = await post_json(api, "/remove_worker", {key: C})
        assert (status, body["status"], C in body["worker_urls"]) == (200, "success", False)
    assert api.fleet.find(C) is None


@pytest.mark.parametrize("body", [{}, {"url": 7}, {"url": " "}])
async def test_a_json_body_without_a_worker_is_refused(api, body):
    status, content = await post_json(api, "/add_worker", body)
    assert (status, content["error"]["code"]) == (400, "missing_url")
