"""Which control routes a page of another origin may read."""

import pytest

from omni_proxy.config.schema import ServerConfig
from tests.admin_api.api_fixture import A, build_api, entry

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
