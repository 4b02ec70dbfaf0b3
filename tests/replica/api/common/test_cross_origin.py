"""Requests of pages of another origin to a replica without an admin key."""

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


def rows(table):
    words = table.split()
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.fixture
async def keyless():
    async with opened() as world:
        yield world.with_options(admin_api_key=None)


@pytest.mark.parametrize("page", FOREIGN, ids=str)
async def test_it_is_refused_on_routes_that_change_something(keyless, page):
    client = keyless.app.test_client()
    for method, path in rows(CHANGING):
        answer = await client.open(path, method=method, headers=page)
        assert answer.status_code == 403, path
        assert "cross_site" in await answer.get_data(as_text=True)
        assert "access-control-allow-origin" in answer.headers or "Origin" not in page


async def test_it_may_call_models_and_read(keyless):
    client = keyless.app.test_client()
    page = FOREIGN[0]
    assert (await client.get("/health", headers=page)).status_code == 200
    assert (await client.get("/v1/models", headers=page)).status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = await client.post("/v1/chat/completions", json=body, headers=page)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}]
)
async def test_a_command_and_a_page_of_its_own_may(keyless, headers):
    answer = await keyless.app.test_client().post("/flush_cache", headers=headers)
    assert answer.status_code != 403


async def test_a_browsers_get_changes_nothing(keyless):
    sent = {"User-Agent": "Mozilla/5.0"}
    client = keyless.app.test_client()
    assert (await client.get("/flush_cache", headers=sent)).status_code == 403
    assert (await client.get("/health", headers=sent)).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "evil.localhost.:1"])
async def test_a_page_under_a_name_that_was_pointed_here_changes_nothing(keyless, host):
    client = keyless.app.test_client()
    page = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    answer = await client.post("/flush_cache", headers=page)
    own = host.startswith("evil.localhost")
    assert (answer.status_code == 403) is not own
    # A proxy may use any host name for it, also for requests of browsers.
    passed_on = {"Host": host, "User-Agent": "Mozilla/5.0"}
    assert (await client.post("/flush_cache", headers=passed_on)).status_code != 403


async def test_a_page_at_an_address_of_its_own_may(keyless):
    client = keyless.app.test_client()
    for host in ("127.0.0.1:8000", "[::1]:8000", "10.0.0.7"):
        page = {"Host": host, "Origin": f"http://{host}"}
        assert (await client.post("/flush_cache", headers=page)).status_code != 403, host


async def test_a_valid_key_overrides_the_origin_check(keyless):
    world = keyless.with_options(admin_api_key="k")
    headers = {**FOREIGN[0], "Authorization": "Bearer k"}
    client = world.app.test_client()
    assert (await client.post("/flush_cache", headers=headers)).status_code != 403
    assert (await client.post("/flush_cache", headers=FOREIGN[0])).status_code == 401


async def test_every_route_is_listed_or_kept_from_strangers(keyless):
    rules = {rule.rule for rule in keyless.app.url_map.iter_rules()}
    assert rules >= READ_ROUTES | MODEL_ROUTES
    for method, path in rows(CHANGING):
        assert not is_open(method, path)


def test_an_origin_that_can_not_be_read_is_not_our_own():
    from werkzeug.datastructures import Headers

    assert is_cross_origin(Headers({"Origin": "null"}), "http://")
    assert is_cross_origin(Headers({"Origin": "http://a:b"}), "http://a:b")
