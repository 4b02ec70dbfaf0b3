"""Requests from web pages of another origin to a replica without an admin key."""

import pytest

from omni_proxy.replica.api.common.cross_origin import (
    MODEL_ROUTES,
    READ_ROUTES,
    is_cross_origin,
    is_open,
)
from tests.replica.api.api_fixture import opened

CHANGING = """
POST /pause_generation  POST /continue_generation  GET /flush_cache  POST /flush_cache
POST /update_weights_from_disk  POST /init_weights_update_group
POST /update_weights_from_distributed  GET /weights_checker  GET /get_weights_by_name
POST /update_weights_from_tensor  POST /model_info
"""
FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Referer": "http://evil.example/"},
]


def routes_of(table):
    words = table.split()
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.fixture
async def keyless():
    async with opened() as api:
        yield api.with_options(admin_api_key=None)


@pytest.mark.parametrize("page", FOREIGN, ids=str)
async def test_a_cross_origin_page_is_refused_on_routes_that_change_state(keyless, page):
    client = keyless.app.test_client()
    for method, path in routes_of(CHANGING):
        response = await client.open(path, method=method, headers=page)
        assert response.status_code == 403, path
        assert "cross_site" in await response.get_data(as_text=True)
        assert "access-control-allow-origin" in response.headers or "Origin" not in page


async def test_a_cross_origin_page_may_call_models_and_read(keyless):
    client = keyless.app.test_client()
    page = FOREIGN[0]
    assert (await client.get("/health", headers=page)).status_code == 200
    assert (await client.get("/v1/models", headers=page)).status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}]}
    response = await client.post("/v1/chat/completions", json=body, headers=page)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}]
)
async def test_command_line_clients_and_same_origin_pages_may_change_state(keyless, headers):
    response = await keyless.app.test_client().post("/flush_cache", headers=headers)
    assert response.status_code != 403


async def test_a_browsers_get_on_a_changing_route_is_refused(keyless):
    headers = {"User-Agent": "Mozilla/5.0"}
    client = keyless.app.test_client()
    assert (await client.get("/flush_cache", headers=headers)).status_code == 403
    assert (await client.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "evil.localhost.:1"])
async def test_a_page_under_a_rebound_dns_name_is_refused(keyless, host):
    client = keyless.app.test_client()
    page = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    response = await client.post("/flush_cache", headers=page)
    is_local = host.startswith("evil.localhost")
    assert (response.status_code == 403) is not is_local
    # A proxy may reach the replica by any host name, also with requests that it relays from browsers.
    relayed = {"Host": host, "User-Agent": "Mozilla/5.0"}
    assert (await client.post("/flush_cache", headers=relayed)).status_code != 403


async def test_a_page_served_from_an_ip_address_may_change_state(keyless):
    client = keyless.app.test_client()
    for host in ("127.0.0.1:8000", "[::1]:8000", "10.0.0.7"):
        page = {"Host": host, "Origin": f"http://{host}"}
        assert (await client.post("/flush_cache", headers=page)).status_code != 403, host


async def test_a_valid_key_overrides_the_origin_check(keyless):
    api = keyless.with_options(admin_api_key="k")
    headers = {**FOREIGN[0], "Authorization": "Bearer k"}
    client = api.app.test_client()
    assert (await client.post("/flush_cache", headers=headers)).status_code != 403
    assert (await client.post("/flush_cache", headers=FOREIGN[0])).status_code == 401


async def test_listed_routes_exist_and_changing_routes_are_not_open(keyless):
    rules = {rule.rule for rule in keyless.app.url_map.iter_rules()}
    assert rules >= READ_ROUTES | MODEL_ROUTES
    for method, path in routes_of(CHANGING):
        assert not is_open(method, path)


def test_an_unreadable_origin_counts_as_cross_origin():
    from werkzeug.datastructures import Headers

    assert is_cross_origin(Headers({"Origin": "null"}), "http://")
    assert is_cross_origin(Headers({"Origin": "http://a:b"}), "http://a:b")
