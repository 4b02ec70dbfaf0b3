import json

import pytest

from omni_proxy.admin_api.routes.operations.weight_routes import NO_TENSORS
from omni_proxy.admin_ops.admin_route_table import ROUTES
from omni_proxy.config.schema import WeightSyncConfig
from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.weight_sync.operation_fixture import GatedEngines

ENGINES = GatedEngines
UPDATE = "/update_weights_from_disk"
PARTS = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}


@pytest.fixture
def api(settled):
    return settled


async def call_route(api, path, method="post", **options):
    response = await getattr(api.client(), method)(path, **options)
    return response.status_code, await response.get_json(), response


async def test_the_callers_body_query_and_key_are_sent_to_every_worker(api, engines):
    body = b'{"model_path":  "/m", "weight_version": "v1"}'
    status, report, _ = await call_route(
        api, f"{UPDATE}?a=1&selector=model!=x&b=%20", data=body,
        headers={"Authorization": "Bearer t", "Connection": "close", "X-Own": "1"},
    )  # fmt: skip
    assert (status, report["path"], report["worker_count"]) == (200, UPDATE, 2)
    sent = [r for r in engines.requests if r.url.path == UPDATE]
    assert sorted(r.url.port for r in sent) == [8011, 8012]
    for request in sent:
        assert request.content == body
        assert request.url.raw_path == b"/update_weights_from_disk?a=1&b=%20"
        assert request.headers["authorization"] == "Bearer t"
        assert request.headers["content-type"] == "application/json"
        assert request.headers["x-own"] == "1"
        assert request.headers.get("connection") != "close"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_every_route_of_the_table_is_served_with_exactly_its_methods(api, route):
    served = {
        rule.rule: rule.methods - {"HEAD", "OPTIONS"} for rule in api.app.url_map.iter_rules()
    }
    assert served[route.path] == set(route.methods)


async def test_a_selector_selects_workers(api, engines):
    status, body, _ = await call_route(api, "/pause_generation?selector=model=n", json={})
    assert (status, [result["worker"] for result in body["results"]]) == (200, [B])
    assert {r.url.port for r in engines.requests} == {8012}


async def test_a_selector_may_name_fields_that_engines_report(api, engines):
    engines.set_reply(A, "/server_info", {"tp_size": 2, "version": "0.5"})
    engines.set_reply(B, "/server_info", {"tp_size": 1})
    status, body, _ = await call_route(api, "/pause_generation?selector=tp_size=2", json={})
    assert (status, [result["worker"] for result in body["results"]]) == (200, [A])


async def test_an_update_from_tensors_gets_a_501_and_is_not_sent(api, engines):
    status, body, _ = await call_route(api, "/update_weights_from_tensor", data=b"\x80anything")
    assert (status, body["error"]) == (501, NO_TENSORS["error"])
    assert engines.requests == []


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (UPDATE, b"{", "invalid JSON"),
        (UPDATE, b"[]", "must be a JSON object"),
        ("/pause_generation", b"\xff", "invalid JSON"),
        ("/update_weights_from_distributed", json.dumps({**PARTS, "names": []}).encode(), "length"),
        ("/update_weights_from_distributed", json.dumps({**PARTS, "dtypes": 3}).encode(), "length"),
        ("/update_weights_from_distributed", b"{}", "length"),
        ("/pause_generation?selector=model", b"{}", "at offset 5"),
    ],
)
async def test_an_invalid_broadcast_is_refused_before_any_call(api, engines, path, body, reason):
    status, content, _ = await call_route(api, path, data=body)
    assert (status, content["success"], content["status"]) == (400, False, "error")
    assert reason in content["message"]
    assert engines.requests == []


async def test_in_mode_off_a_complete_distributed_update_is_passed_on(engines, tmp_path, nursery):
    off = WeightSyncConfig(mode="off")
    api = build_api(entry(A), entry(B), folder=tmp_path / "off", weight_sync=off)
    api.healthy(A, B)
    await nursery.start(api.operations.run)
    status, body, _ = await call_route(api, "/update_weights_from_distributed", json=PARTS)
    assert (status, body["worker_count"]) == (200, 2)


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("post", "/pause_generation", None, 401),
        ("post", "/update_weights_from_tensor", None, 401),
        ("post", "/weights/resolve", "wrong", 403),
        ("get", "/pause_generation", "k", 405),
        ("get", "/model_info", None, 401),
    ],
)
async def test_every_refusal_of_a_weight_route_has_the_error_at_the_top_level(
    method, path, key, status
):
    api = build_api(entry(A), key="k")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    received, body, response = await call_route(api, path, method, headers=headers)
    assert (received, body["success"], body["status"]) == (status, False, "error")
    assert body["message"] == body["error"]["message"]
    assert "detail" in body
    assert ("WWW-Authenticate" in response.headers) is (status == 401)


async def test_errors_of_other_routes_have_no_such_top_level(api):
    _, body, _ = await call_route(api, "/workers", json={"url": "ftp://x"})
    assert "success" not in body


async def test_model_info_of_all_workers_is_one_object(api, engines):
    status, body, _ = await call_route(api, "/model_info", "get")
    assert (status, body["weight_version"], body["worker_count"]) == (200, "v1", 2)
    engines.labels[B] = "v2"
    status, body, _ = await call_route(api, "/model_info", json={})
    assert (status, body["detail"]["message"]) == (409, "mixed worker weight_version")


async def test_a_get_of_the_weights_checker_is_sent_with_its_query(api, engines):
    status, body, _ = await call_route(api, "/weights_checker?action=checksum", "get")
    assert (status, body["worker_count"]) == (200, 2)
    assert engines.requests[-1].url.query == b"action=checksum"


async def test_weights_that_all_workers_share_are_returned_as_by_one_engine(api, engines):
    path = "/get_weights_by_name"
    for url in (A, B):
        engines.set_reply(url, path, [[1.0, 2.0]])
    request = {"name": "w", "truncate_size": 1}
    assert (await call_route(api, path, json=request))[:2] == (200, [[1.0, 2.0]])
    status, body, _ = await call_route(
        api, "/v1/rl/engine/get_weights_by_name?selector=id!=x", json=request
    )
    assert (status, body["succeeded"]) == (200, 2)
    engines.set_reply(B, path, [[1.0, 2.5]])
    status, body, _ = await call_route(api, path, json=request)
    assert (status, body["success"], len(body["results"])) == (409, False, 2)
    for url in (A, B):
        engines.replies[url, path] = (400, b'{"error": {"message": "no such tensor"}}')
    status, body, _ = await call_route(api, path, json=request)
    assert (status, body["error"], body["status"]) == (400, {"message": "no such tensor"}, "error")
    engines.set_reply(B, path, [[1.0, 2.5]])
    status, body, _ = await call_route(api, path, json=request)
    assert (status, body["success"]) == (502, False)
