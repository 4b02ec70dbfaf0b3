"""Requests from web pages of another origin to a replica without an admin key."""

import re

import pytest

from omni_proxy.replica.api.common.cross_origin import (
    MODEL_ROUTES,
    READ_ROUTES,
    is_open,
)
from omni_proxy.replica.api.openapi_document import ALL_ENDPOINTS, HIDDEN
from omni_proxy.routing.routes import MethodNotAllowed, match_route
from tests.replica.api.api_fixture import opened

# The only routes that a page of another origin may call with a method other than GET and HEAD.
MODEL_CALLS = """
POST /v1/chat/completions  POST /v1/chat/completions/render  POST /v1/completions
POST /v1/completions/render  POST /v1/embeddings  POST /v1/messages
POST /v1/messages/count_tokens  POST /v1/responses  DELETE /v1/responses/x
POST /v1/responses/x/cancel  POST /v1/audio/speech  POST /v1/audio/speech/batch
POST /v1/audio/voices  DELETE /v1/audio/voices/x  POST /v1/audio/transcriptions
POST /v1/audio/translations  POST /v1/audio/diarizations  POST /generate  POST /inference/v1/generate
POST /tokenize  POST /detokenize  POST /v1/tokenize  POST /v1/detokenize
"""
CHANGING_WITH_GET = "GET /flush_cache  GET /weights_checker  GET /get_weights_by_name"
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


def served_routes(app, *, are_open):
    """Method and path of each route that is open to pages, or that is not."""
    return {
        (method, re.sub("<[^>]*>", "x", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in rule.methods - {"OPTIONS"}
        if is_open(method, rule.rule) is are_open
    }


@pytest.fixture
async def keyless():
    async with opened() as api:
        yield api.with_options(admin_api_key=None)


@pytest.mark.parametrize("page", FOREIGN, ids=str)
async def test_a_cross_origin_page_is_refused_on_routes_that_change_state(keyless, page):
    client = keyless.app.test_client()
    for method, path in served_routes(keyless.app, are_open=False):
        response = await client.open(path, method=method, headers=page)
        assert response.status_code == 403, path
        assert method == "HEAD" or "cross_site" in await response.get_data(as_text=True)
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


@pytest.mark.parametrize(
    "headers",
    [{"User-Agent": "Mozilla/5.0"}, {"Sec-Fetch-Mode": "no-cors"}, {"Sec-Fetch-Dest": "image"}],
)
async def test_a_browsers_get_on_a_changing_route_is_refused(keyless, headers):
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


async def test_all_routes_of_text_and_audio_are_model_routes(keyless):
    served = {
        rule.rule
        for rule in keyless.app.url_map.iter_rules()
        if rule.websocket
        or (rule.endpoint not in HIDDEN and ALL_ENDPOINTS[rule.endpoint].tag in ("text", "audio"))
    }
    assert served == MODEL_ROUTES


def test_the_proxy_relays_all_model_routes_but_the_one_that_every_replica_refuses():
    paths = {re.sub("<[^>]*>", "x", rule) for rule in MODEL_ROUTES}
    assert {path for path in paths if not _is_relayed(path)} == {"/v1/audio/diarizations"}


def _is_relayed(path):
    try:
        return match_route("TRACE", path) is not None
    except MethodNotAllowed:
        return True


async def test_only_listed_routes_are_open(keyless):
    rules = {rule.rule for rule in keyless.app.url_map.iter_rules()}
    assert rules >= READ_ROUTES | MODEL_ROUTES
    opened = served_routes(keyless.app, are_open=True)
    calls = {(method, path) for method, path in opened if method not in ("GET", "HEAD")}
    assert calls == set(routes_of(MODEL_CALLS))
    assert not opened & set(routes_of(CHANGING_WITH_GET))
