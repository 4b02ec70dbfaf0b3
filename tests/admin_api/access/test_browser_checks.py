"""Requests that a page of another origin makes a browser send: how they are checked, and which
control routes it may read."""

import pytest

from omni_proxy.admin_api.access.browser_checks import ANY_HOST, READING
from omni_proxy.admin_api.access.roles import MODEL_CLIENT_POSTS
from omni_proxy.admin_api.routes.operations.weight_routes import CONFIGURED
from omni_proxy.config.schema import AdminConfig, ServerConfig
from omni_proxy.shared.origins import hostname_of, is_local_name, parse_origin
from tests.admin_api.api_fixture import A, build_api, entry

HOST = "10.0.0.5:30000"
OWN = f"http://{HOST}"
# All routes and methods that are not in READING: each changes something, or may.
CHANGING = """
POST /workers  PUT /workers/<path:name>  PATCH /workers/<path:name>  DELETE /workers/<path:name>
POST /workers/<path:name>/drain  POST /add_worker  POST /remove_worker  POST /reload  POST /explain
GET /flush_cache  POST /flush_cache  POST /weights/resolve  POST /weight_update_journal/resolve
POST /weights/rollback  POST /weights/rollout  POST /weights/rollout/pause
POST /weights/rollout/resume  POST /weights/rollout/cancel  POST /weights/sync/abort  POST /model_info  GET /weights_checker  POST /weights_checker
GET /get_weights_by_name  POST /get_weights_by_name  POST /start_profile  POST /stop_profile
POST /continue_generation
POST /pause_generation  POST /init_weights_update_group  POST /prepare_weights_update
POST /complete_weights_update  POST /destroy_weights_update_group  POST /begin_weight_update
POST /finish_session  POST /end_weight_update  POST /update_weights_from_disk  POST /update_weights_from_distributed
POST /update_weights_from_tensor  POST /update_weight_version
POST /pause  POST /resume  POST /sleep  POST /wake_up  POST /weight_checker  POST /collective_rpc
POST /init_weight_transfer_engine  POST /shutdown_weight_transfer_engine  POST /update_weights
POST /start_weight_update  POST /start_draft_weight_update  POST /finish_weight_update
POST /reset_prefix_cache  POST /load_lora_adapter  POST /unload_lora_adapter
POST /v1/load_lora_adapter  POST /v1/unload_lora_adapter
POST /abort_request  POST /abort_requests
POST /keys  DELETE /keys/<path:caller>
POST /select  POST /select_and_reserve  DELETE /reservations/<path:reservation_id>
"""
ENGINE = ("/v1/rl/engine/<path:path>", "/v1/rl/workers/<path:name>/engine/<path:path>")
ENGINE_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": f"https://{HOST}"},
    {"Origin": "http://10.0.0.5:8080"},
    {"Origin": "http://10.0.0.5"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Origin": OWN},
    {"Referer": "http://evil.example/page"},
]


def received(host=HOST, *, scheme="http", listener="tcp"):
    return {"X-Omni-Received": f"{listener} {scheme} {host}"}


def rows(table):
    words = table.split()
    return set(zip(words[::2], words[1::2], strict=True))


def test_every_route_is_listed_as_reading_or_as_changing(api):
    served = {
        (method, rule.rule)
        for rule in api.app.url_map.iter_rules()
        if rule.rule != CONFIGURED  # counts as changing, like every route that is not in READING
        for method in rule.methods - {"OPTIONS", "HEAD"}
    }
    changing = rows(CHANGING) | {(method, rule) for rule in ENGINE for method in ENGINE_METHODS}
    assert served - changing == {("GET", rule) for rule in READING}
    assert changing <= served
    assert ANY_HOST <= READING


def path_of(rule):
    return rule.replace("<path:name>", "x").replace("<path:path>", "release_memory_occupation")


def code_of(response):
    return (response["error"]["code"], "detail" in response)


@pytest.mark.parametrize("page", FOREIGN, ids=str)
async def test_a_page_of_another_origin_adds_no_worker(api, page):
    headers = {"Content-Type": "text/plain;charset=UTF-8", **received(), **page}
    response = await api.client().post("/workers", data=b'{"url":"http://c:1"}', headers=headers)
    assert response.status_code == 403
    assert code_of(await response.get_json()) == ("cross_site", True)
    assert len(api.fleet.workers) == 2


@pytest.mark.parametrize("page", FOREIGN, ids=str)
async def test_a_page_of_another_origin_changes_nothing_by_any_route(api, page):
    changing = rows(CHANGING) | {(method, rule) for rule in ENGINE for method in ENGINE_METHODS}
    for method, rule in sorted(changing):
        response = await api.client().open(
            path_of(rule), method=method, headers={**received(), **page}
        )
        assert response.status_code == 403, (method, rule)
        assert (await response.get_json())["error"]["code"] == "cross_site"


async def test_a_cross_site_head_is_refused_like_a_get(api):
    headers = {**received(), "Sec-Fetch-Site": "cross-site"}
    assert (await api.client().head("/flush_cache", headers=headers)).status_code == 403


@pytest.mark.parametrize(
    "browser_headers",
    [
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Dest": "image"},
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"},
        {"Origin": OWN},
        {"Referer": f"{OWN}/dashboard"},
    ],
    ids=str,
)
async def test_a_get_of_a_browser_changes_nothing(api, browser_headers):
    for path in ("/flush_cache", "/v1/rl/engine/start_profile?selector=x!%3Dy"):
        response = await api.client().get(path, headers={**received(), **browser_headers})
        assert response.status_code == 403
        assert (await response.get_json())["error"]["code"] == "browser_get"


@pytest.mark.parametrize("page", FOREIGN, ids=str)
async def test_a_page_of_another_origin_may_link_to_routes_that_only_read(api, page):
    for path in ("/config", "/dashboard", "/workers", "/live"):
        response = await api.client().get(path, headers={**received(), **page})
        assert response.status_code == 200
        assert "Access-Control-Allow-Credentials" not in response.headers


@pytest.mark.parametrize(
    ("connection", "headers", "server"),
    [
        (received(), {}, ServerConfig()),
        (received(), {"Sec-Fetch-Mode": "cors"}, ServerConfig()),
        (received(), {"Origin": OWN, "Sec-Fetch-Site": "same-origin"}, ServerConfig()),
        (received(), {"Referer": f"{OWN}/dashboard"}, ServerConfig()),
        (received("localhost"), {"Origin": "http://localhost"}, ServerConfig()),
        (
            received("localhost:443", scheme="https"),
            {"Origin": "https://localhost"},
            ServerConfig(),
        ),
        (received("[::1]:30000"), {"Origin": "http://[::1]:30000"}, ServerConfig()),
        (
            received("127.0.0.1:1"),
            {"Origin": "https://127.0.0.2", "X-Forwarded-Proto": "https"}
            | {"X-Forwarded-Host": "127.0.0.2, 127.0.0.1:1"},
            ServerConfig(forwarded="append"),
        ),
    ],
)
async def test_the_dashboard_and_commands_may_change_workers(connection, headers, server):
    api = build_api(entry(A), server=server)
    path = f"/workers/{api.worker(A).id}"
    response = await api.client().put(
        path, json={"disabled": True}, headers={**connection, **headers}
    )
    assert response.status_code == 200
    assert api.worker(A).disabled


async def test_forwarded_headers_of_a_client_are_trusted_only_if_configured():
    claims = {"X-Forwarded-Host": "evil.example", "Origin": "http://evil.example"}
    for forwarded, code in {
        "off": "cross_site", "replace": "cross_site", "append": "host_not_allowed",
    }.items():  # fmt: skip
        api = build_api(entry(A), server=ServerConfig(forwarded=forwarded))
        response = await api.client().post("/reload", headers={**received(), **claims})
        assert response.status_code == 403
        assert (await response.get_json())["error"]["code"] == code


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_browser_request_needs_a_json_content_type(api, content_type):
    headers = {
        **received(),
        "Origin": OWN,
        **({"Content-Type": content_type} if content_type else {}),
    }
    body = b'{"url":"http://c.test:1"}'
    headers["Content-Length"] = str(len(body))
    response = await api.client().post("/workers", data=body, headers=headers)
    assert response.status_code == 415
    assert (await response.get_json())["error"]["code"] == "unsupported_media_type"


async def test_a_command_line_client_needs_no_content_type(api):
    response = await api.client().post(
        "/workers",
        data=b'{"url":"http://c.test:1"}',
        headers={**received(), "Content-Type": "application/x-www-form-urlencoded"},
    )
    assert response.status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:30000", "localhost.evil", "1.2.3"])
async def test_without_a_key_no_control_route_answers_under_a_foreign_host(api, host):
    routes = {("GET", rule) for rule in READING - ANY_HOST} | rows(CHANGING)
    for method, rule in sorted(routes - {("POST", rule) for rule in MODEL_CLIENT_POSTS}):
        response = await api.client().open(path_of(rule), method=method, headers=received(host))
        assert response.status_code == 403, (method, rule)
        error = (await response.get_json())["error"]
        assert error["code"] == "host_not_allowed"
        assert "[admin] allowed_hosts" in error["message"]
        assert repr(hostname_of(host)) in error["message"]


async def test_health_is_reported_under_any_host_but_without_addresses(api):
    for path in ("/live", "/ready", "/health", "/liveness", "/readiness", "/dashboard"):
        response = await api.client().get(path, headers=received("omni-proxy.default.svc"))
        assert response.status_code in (200, 503)
        assert A not in await response.get_data(as_text=True)
    response = await api.client().get("/health", headers=received())
    assert A in await response.get_data(as_text=True)


@pytest.mark.parametrize(
    "connection",
    [
        received("127.0.0.1:30000"), received("[::1]:30000"), received("192.0.2.7"),
        received("localhost"), received("LOCALHOST.:1"), received("a.localhost:1"),
        received("Proxy.Internal:30000"), received("proxy.internal."), received(""),
        received("admin", listener="unix"), {},
    ],
    ids=str,
)  # fmt: skip
async def test_addresses_localhost_and_allowed_hosts_are_answered(connection):
    api = build_api(entry(A), admin=AdminConfig(allowed_hosts=("proxy.internal",)))
    assert (await api.client().get("/config", headers=connection)).status_code == 200


async def test_the_forwarded_host_of_a_trusted_proxy_is_checked_too():
    claims = {"X-Forwarded-Host": "evil.example"}
    api = build_api(entry(A), server=ServerConfig(forwarded="append"))
    for connection in (received(), received("proxy", listener="unix")):
        response = await api.client().get("/config", headers={**connection, **claims})
        assert response.status_code == 403
    forwarded = {**received("admin", listener="unix"), "X-Forwarded-Host": "admin"}
    assert (await api.client().get("/config", headers=forwarded)).status_code == 200


async def test_open_metrics_are_served_under_any_host():
    api = build_api(entry(A), admin=AdminConfig(open_metrics=True))
    headers = received("omni-proxy:30000")
    assert (await api.client().get("/metrics", headers=headers)).status_code == 200


async def test_a_valid_key_is_accepted_from_any_origin_and_host():
    api = build_api(entry(A), key="s3cret")
    path = f"/workers/{api.worker(A).id}"
    for page in FOREIGN:
        headers = {**received("evil.example"), **page, "Authorization": "Bearer s3cret"}
        response = await api.client().put(path, json={"disabled": True}, headers=headers)
        assert response.status_code == 200


async def test_with_a_key_open_routes_are_answered_under_any_host():
    client = build_api(entry(A), key="s3cret").client()
    assert (await client.get("/workers", headers=received("proxy"))).status_code == 200
    assert (await client.get("/config", headers=received("proxy"))).status_code == 401


async def test_the_same_checks_apply_to_a_listener_without_a_key():
    admin = AdminConfig(api_key="s3cret", listen="127.0.0.1:1", listen_key=False)
    api = build_api(entry(A), admin=admin)
    same_host = {"Host": "admin", **received()}
    assert (await api.client().post("/reload", headers=same_host)).status_code == 200
    for page in FOREIGN:
        response = await api.client().post("/reload", headers={**same_host, **page})
        assert response.status_code == 403
    foreign_host = {"Host": "admin", **received("evil.example")}
    assert (await api.client().get("/config", headers=foreign_host)).status_code == 403


@pytest.mark.parametrize(
    ("host", "name"),
    [("A.B:1", "a.b"), ("[::1]:1", "::1"), ("[::1]", "::1"), ("a.", "a"), ("", ""), (":1", "")],
)
def test_the_hostname_of_a_host_field_has_no_port(host, name):
    assert hostname_of(host) == name


@pytest.mark.parametrize("name", ["2130706433", "0x7f.1", "localhost.evil", "notlocalhost", "1.2"])
def test_a_name_that_only_looks_like_an_address_is_not_local(name):
    assert not is_local_name(name)


@pytest.mark.parametrize("text", ["null", "", "http://", "http://a:b", "http://[", "a:1"])
def test_an_invalid_origin_is_parsed_as_an_empty_one(text):
    assert parse_origin(text) == ("", "", None)


PAGE = {"Origin": "https://app.example"}
ALLOW = "Access-Control-Allow-Origin"


def preflight(method):
    return {**PAGE, "Access-Control-Request-Method": method}


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/workers", "/list_workers"])
async def test_open_routes_may_be_read(api, path):
    response = await api.client().get(path, headers=PAGE)
    assert response.headers[ALLOW] == "*"
    response_to_preflight = await api.client().options(path, headers=preflight("GET"))
    assert (response_to_preflight.status_code, response_to_preflight.headers[ALLOW]) == (200, "*")
    assert response_to_preflight.headers["Access-Control-Allow-Methods"] == "GET, HEAD"
    assert ALLOW not in (await api.client().get(path)).headers


@pytest.mark.parametrize("path", ["/config", "/status", "/metrics", "/weights", "/nowhere"])
async def test_routes_that_can_need_a_key_may_not_be_read(api, path):
    assert ALLOW not in (await api.client().get(path, headers=PAGE)).headers
    assert ALLOW not in (await api.client().options(path, headers=preflight("GET"))).headers


@pytest.mark.parametrize(
    ("path", "method"),
    [("/workers", "POST"), ("/workers/x", "DELETE"), ("/reload", "POST"), ("/flush_cache", "GET")],
)
async def test_no_preflight_allows_a_change(api, path, method):
    response_to_preflight = await api.client().options(path, headers=preflight(method))
    assert not [
        name
        for name, _ in response_to_preflight.headers
        if name.lower().startswith("access-control")
    ]


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((), None), (("https://other.example",), None), (("https://app.example",), PAGE["Origin"])],
)
async def test_allowed_origins_come_from_the_configuration(origins, allowed):
    api = build_api(entry(A), server=ServerConfig(cors_allow_origins=origins))
    response = await api.client().get("/workers", headers=PAGE)
    assert (response.status_code, response.headers.get(ALLOW)) == (200, allowed)
    assert ("Origin" in response.vary) is bool(allowed)
