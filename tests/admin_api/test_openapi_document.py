import re

import pytest

from omni_proxy import __version__
from omni_proxy.admin_api.access import needs_key
from omni_proxy.admin_api.openapi_document import TABLE, description
from omni_proxy.admin_api.routes.broadcast_routes import CONFIGURED
from omni_proxy.config.schema import AdminConfig
from tests.admin_api.api_fixture import A, B, build_api, entry


def operations():
    for path, methods in description()["paths"].items():
        for method, reported in methods.items():
            yield method.upper(), path, reported


def test_it_describes_every_route_of_the_front_and_nothing_else():
    served = set()
    for rule in build_api().app.url_map.iter_rules():
        path = (
            rule.rule.replace("<path:path>", "{path}")
            .replace("<path:model>", "{model}")
            .replace("<path:caller>", "{caller}")
            .replace("<path:name>", "{worker_id}")
            .replace("<path:reservation_id>", "{reservation_id}")
        )
        served |= {(method, path) for method in rule.methods - {"HEAD", "OPTIONS"}}
    configured = {("GET", CONFIGURED), ("POST", CONFIGURED)}  # of the configuration, not of ours
    assert {(method, path) for method, path, _ in operations()} == served - configured


def test_no_route_is_described_twice():
    assert len({(route.method, route.path) for route in TABLE}) == len(TABLE)
    names = [reported["operationId"] for _, _, reported in operations()]
    assert len(set(names)) == len(names)


def test_each_route_reports_whether_it_needs_the_key():
    for method, path, reported in operations():
        closed = needs_key(method, path, AdminConfig(api_key="k"))
        assert ("security" in reported) is closed, (method, path)
        assert ({"401", "403"} <= reported["responses"].keys()) is closed, (method, path)
    scheme = description()["components"]["securitySchemes"]["key"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")


def references(value):
    if isinstance(value, dict):
        yield from ([value["$ref"]] if "$ref" in value else ())
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_schema_is_used_and_every_used_one_is_there():
    reported = description()
    named = {f"#/components/schemas/{name}" for name in reported["components"]["schemas"]}
    assert set(references(reported)) == named


def test_every_place_in_a_path_is_a_parameter():
    for _, path, reported in operations():
        given = {each["name"] for each in reported.get("parameters", ()) if each["in"] == "path"}
        assert given == set(re.findall(r"{(\w+)}", path))


async def test_it_is_answered_without_the_key_and_names_the_version():
    answer = await build_api(key="secret").client().get("/openapi.json")
    assert answer.status_code == 200
    assert answer.content_type == "application/json"
    body = await answer.get_json()
    assert body == description()
    assert (body["openapi"], body["info"]["version"]) == ("3.1.0", __version__)


@pytest.mark.parametrize(("schema", "path"), [("Worker", f"/workers/{A}"), ("Pool", "/health")])
async def test_every_key_of_an_answer_is_described(schema, path):
    api = build_api(entry(A), entry(B))
    body = await (await api.client().get(path)).get_json()
    assert body.keys() <= description()["components"]["schemas"][schema]["properties"].keys()
