import pytest

from omni_proxy.admin_api.access.roles import needs_key
from omni_proxy.config.schema import AdminConfig, Config
from tests.admin_api.api_fixture import A, build_api, entry

CLOSED = """
GET /status  GET /config  POST /reload  POST /explain  GET /explain  GET /engine_metrics
GET /metrics  GET /weights  GET /weights/versions  GET /model_info  POST /model_info
GET /weights_checker  POST /flush_cache  GET /v1/rl/workers  POST /v1/rl/engine/pause
GET /finish_session  POST /workers  PUT /workers/x  PATCH /workers/x  DELETE /workers/x  GET /dashboard/feed
POST /pause_generation  POST /continue_generation  POST /update_weights_from_disk
"""
OPEN = """
GET /live  GET /ready  GET /health  HEAD /health  GET /workers  GET /workers/http://a:1
GET /v1/models  GET /server_info  GET /get_server_info  GET /get_model_info  GET /get_loads
GET /list_workers  GET /liveness  GET /readiness  GET /health_generate  GET /openapi.json
GET /dashboard  OPTIONS /workers  POST /finish_session
"""


def rows(table):
    words = table.split()
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(("method", "path"), rows(CLOSED))
def test_a_closed_route_needs_the_key(method, path):
    assert needs_key(method, path, AdminConfig(api_key="k"))


@pytest.mark.parametrize(("method", "path"), rows(OPEN))
def test_an_open_route_needs_no_key(method, path):
    assert not needs_key(method, path, AdminConfig(api_key="k"))


def test_metrics_can_be_opened():
    assert not needs_key("GET", "/metrics", AdminConfig(api_key="k", open_metrics=True))


async def test_without_a_key_everything_is_open(api):
    assert (await api.client().get("/config")).status_code == 200


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Basic s3cret", "s3cret"])
async def test_a_missing_or_malformed_key_gets_401_with_a_hint(authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    response = await build_api(entry(A), key="s3cret").client().get("/config", headers=headers)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    detail = (await response.get_json())["detail"]
    assert detail == "Admin API key required: Authorization: Bearer <key>"


async def test_a_wrong_key_is_a_403():
    client = build_api(entry(A), key="s3cret").client()
    response = await client.get("/config", headers={"Authorization": "Bearer s3cre"})
    assert response.status_code == 403
    assert (await response.get_json())["detail"] == "Invalid admin API key"


@pytest.mark.parametrize("authorization", ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret "])
async def test_the_right_key_is_accepted_in_any_case_of_the_scheme(authorization):
    client = build_api(entry(A), key="s3cret").client()
    response = await client.get("/config", headers={"Authorization": authorization})
    assert response.status_code == 200


async def test_a_non_ascii_key_is_compared_as_bytes():
    client = build_api(entry(A), key="schlüssel").client()
    headers = {"Authorization": "Bearer schlüssel"}  # the test client sends UTF-8
    assert (await client.get("/config", headers=headers)).status_code == 200


async def test_a_changed_key_applies_without_a_restart():
    api = build_api(entry(A))
    api.config_store.config = Config(admin=AdminConfig(api_key="new"))
    assert (await api.client().get("/config")).status_code == 401
    api.config_store.config = Config()
    assert (await api.client().get("/config")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("PUT", "/live", 405)]
)
async def test_unknown_routes_need_no_key(method, path, status):
    client = build_api(entry(A), key="s3cret").client()
    assert (await client.open(path, method=method)).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_changing_workers_needs_the_key(method):
    api = build_api(entry(A), key="s3cret")
    path = "/workers" if method == "POST" else f"/workers/{A}"
    assert (await api.client().open(path, method=method, data=b"{}")).status_code == 401
    assert api.config_store.revision == 1


async def test_a_valid_key_is_accepted_from_any_address():
    api = build_api(entry(A), key="s3cret")
    headers = {"Sec-Fetch-Site": "cross-site", "Authorization": "Bearer s3cret"}
    path = f"/workers/{api.worker(A).id}"
    response = await api.client().put(path, json={"disabled": True}, headers=headers)
    assert response.status_code == 200
