import re

import pytest

from omni_proxy import __version__
from omni_proxy.admin_api.access.roles import needs_key
from omni_proxy.admin_api.openapi_document import TABLE, description
from omni_proxy.admin_api.routes.operations.weight_routes import CONFIGURED
from omni_proxy.config.schema import AdminConfig
from tests.admin_api.api_fixture import A, B, build_api, entry


def operations():
    for path, methods in description()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_the_document_describes_exactly_the_served_routes():
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
    # Routes of [[control_routes]] are not described.
    configured = {("GET", CONFIGURED), ("POST", CONFIGURED)}
    assert {(method, path) for method, path, _ in operations()} == served - configured


def test_no_route_is_described_twice():
    assert len({(route.method, route.path) for route in TABLE}) == len(TABLE)
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names)


def test_each_operation_documents_whether_it_needs_the_key():
    for method, path, operation in operations():
        closed = needs_key(method, path, AdminConfig(api_key="k"))
        assert ("security" in operation) is closed, (method, path)
        assert ({"401", "403"} <= operation["responses"].keys()) is closed, (method, path)
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


def test_exactly_the_schemas_that_are_referenced_exist():
    document = description()
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) == schemas


def test_every_placeholder_of_a_path_is_a_parameter():
    for _, path, operation in operations():
        parameters = operation.get("parameters", ())
        names = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
        assert names == set(re.findall(r"{(\w+)}", path))


async def test_the_document_needs_no_key_and_has_the_version():
    response = await build_api(key="secret").client().get("/openapi.json")
    assert response.status_code == 200
    assert response.content_type == "application/json"
    body = await response.get_json()
    assert body == description()
    assert (body["openapi"], body["info"]["version"]) == ("3.1.0", __version__)


@pytest.mark.parametrize(("schema", "path"), [("Worker", f"/workers/{A}"), ("Pool", "/health")])
async def test_every_key_of_a_response_is_described(schema, path):
    api = build_api(entry(A), entry(B))
    body = await (await api.client().get(path)).get_json()
    assert body.keys() <= description()["components"]["schemas"][schema]["properties"].keys()
