from urllib.parse import quote

import pytest

from omni_proxy.admin_api.serializers.weight_status import weight_status
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import LOST, UPDATE, GatedEngines

ENGINES = GatedEngines


@pytest.fixture
def api(settled):
    return settled


async def call_route(api, path, method="get", **options):
    response = await getattr(api.client(), method)(path, **options)
    return response.status_code, await response.get_json()


async def test_the_list_has_every_worker_with_data_of_its_engine(api, engines):
    engines.set_reply(A, "/server_info", {"version": "0.5", "tp_size": 2, "dp_size": 1})
    engines.replies[B, "/server_info"] = LOST
    status, body = await call_route(api, "/v1/rl/workers")
    assert (status, body["protocol_version"]) == (200, 1)
    first, second = body["workers"]
    assert (first["id"], first["url"], first["base_url"]) == (api.worker(A).id, A, A)
    assert (first["engine"], first["engine_version"], first["tp_size"]) == ("sglang", "0.5", 2)
    assert (first["model_id"], first["health"], first["weight_version"]) == ("m", "ready", "v1")
    assert first["capabilities"]["pause_modes"] == ["abort", "retract", "in_place"]
    assert (second["engine_version"], second["tp_size"]) == (None, None)


@pytest.mark.parametrize("reply", [LOST, (500, b"{}"), (200, b"hello"), (200, b"[1]")], ids=repr)
async def test_an_engine_without_server_info_is_not_guessed(api, engines, reply):
    engines.set_reply(A, "/server_info", {"version": "0.5"})
    engines.replies[B, "/server_info"] = reply
    engines.set_reply(A, "/version", {})
    engines.set_reply(B, "/version", {})
    _, body = await call_route(api, "/v1/rl/workers")
    assert [row["engine"] for row in body["workers"]] == ["sglang", None]
    for selector, chosen in (("engine=sglang", A), ("engine!=sglang", B)):
        _, body = await call_route(api, f"/v1/rl/engine/version?selector={quote(selector)}")
        assert list(body["results"]) == [api.worker(chosen).id]


async def test_a_worker_is_found_by_url_or_id(api):
    for name in (A, api.worker(A).id):
        status, body = await call_route(api, f"/v1/rl/workers/{name}")
        assert (status, body["url"]) == (200, A)
    for name in ("HTTP://127.0.0.1:8011", f"{A}/", "http%3A%2F%2F127.0.0.1%3A8011%2F"):
        status, body = await call_route(api, f"/v1/rl/workers/{name}")
        assert (status, body.get("url")) == (200, A)
    status, body = await call_route(api, "/v1/rl/workers/http://unknown:1")
    assert (status, body["error"]["code"]) == (404, "worker_not_found")


async def test_one_engine_is_called_and_its_reply_wrapped(api, engines):
    engines.set_reply(A, "/version", {"v": 1})
    name = api.worker(A).id
    status, body = await call_route(api, f"/v1/rl/workers/{name}/engine/version?x=1")
    assert status == 200
    assert body.pop("latency_ms") >= 0
    assert body == {"worker_id": name, "url": A, "status": 200, "body": {"v": 1}}
    assert engines.requests[-1].url.raw_path == b"/version?x=1"


async def test_a_failed_call_of_one_engine_has_its_reason(api, engines):
    name = api.worker(A).id
    engines.set_reply(A, "/version", {"detail": "no"}, status=404)
    status, body = await call_route(api, f"/v1/rl/workers/{name}/engine/version")
    assert (status, body["status"], body["body"]) == (404, 404, {"detail": "no"})
    assert body["error"]["code"] == "upstream_error"
    engines.replies[A, "/version"] = LOST
    status, body = await call_route(api, f"/v1/rl/workers/{name}/engine/version")
    assert (status, body["error"]["code"]) == (502, "upstream_unreachable")


async def test_a_fan_out_is_a_200_if_all_succeed_and_a_207_otherwise(api, engines):
    path = "/v1/rl/engine/flush_cache?selector=model in (m,n)"
    status, body = await call_route(api, path, "post", json={})
    assert (status, body["total"], body["succeeded"], body["failed"]) == (200, 2, 2, [])
    assert set(body["results"]) == {api.worker(A).id, api.worker(B).id}
    engines.set_reply(B, "/flush_cache", b"busy", status=400)
    status, body = await call_route(api, path, "post", json={})
    assert (status, body["total"], body["succeeded"]) == (207, 2, 1)
    (failed,) = body["failed"]
    assert (failed["url"], failed["error"], failed["status"]) == (B, "upstream_error", 400)


async def test_an_admin_route_is_a_queued_operation(api, engines):
    engines.replies[B, UPDATE] = LOST
    path = f"/v1/rl/engine{UPDATE}?selector=worker_type=regular"
    status, body = await call_route(api, path, "post", json={"model_path": "/m"})
    assert (status, body["succeeded"]) == (207, 1)
    assert body["failed"][0]["error"] == "upstream_unreachable"
    assert [sorted(w.cordon_reasons) for w in api.fleet.workers] == [[], ["uncertain"]]
    assert weight_status(api.operations)["history"][-1]["path"] == UPDATE


async def test_a_fan_out_reports_versions_that_differ_per_worker(api, engines):
    engines.labels[B] = "v2"
    path = "/v1/rl/engine/model_info?selector=worker_type=regular"
    status, body = await call_route(api, path)
    assert (status, body["succeeded"]) == (200, 2)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/rl/engine/flush_cache", 400, "selector_required"),
        ("/v1/rl/engine/flush_cache?selector=", 400, "selector_required"),
        ("/v1/rl/engine/flush_cache?selector=a~b", 400, "invalid_selector"),
        ("/v1/rl/engine/flush_cache?selector=model=zz", 404, "no_workers_match"),
        ("/v1/rl/engine/a/%2e%2e/b?selector=model=m", 400, "invalid_engine_path"),
        ("/v1/rl/workers/http://127.0.0.1:8011/engine/a/%2e%2e/b", 400, "invalid_engine_path"),
    ],
)
async def test_an_invalid_engine_call_is_refused(api, engines, path, status, code):
    received, body = await call_route(api, path, "post", json={})
    assert (received, body["error"]["code"]) == (status, code)
    assert engines.requests == []
    if code == "invalid_selector":
        assert body["offset"] == 1
