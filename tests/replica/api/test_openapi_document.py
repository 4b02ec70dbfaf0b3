import json
import re

import pytest
import schemathesis

from omni_proxy.replica.api.openapi_document import HIDDEN, PAGE, description
from omni_proxy.replica.api.openapi_endpoints import ENDPOINTS
from omni_proxy.replica.http_server import _app


@pytest.fixture
def app(api):
    """The app as `launch_server` builds it, with the profiler's routes."""
    return _app(api.client, {"model_name": "fake"})


def references(value):
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def operations(document):
    return {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


async def test_the_document_is_served_at_openapi_json(api):
    response = await api.get("/openapi.json")
    assert response.status_code == 200
    document = await response.get_json()
    assert document["openapi"].startswith("3.")
    assert document["info"]["title"] == "sglang-omni"
    for path in (
        "/v1/chat/completions", "/health", "/v1/models", "/generate", "/v1/audio/speech",
        "/pause_generation", "/weights_checker",
    ):  # fmt: skip
        assert path in document["paths"], path


async def test_exactly_the_served_routes_are_described(app):
    served = {
        (method.lower(), re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        if not rule.websocket and rule.endpoint not in HIDDEN
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    assert operations(description(app)).keys() == served
    mounted = {rule.endpoint for rule in app.url_map.iter_rules()}
    assert ENDPOINTS.keys() <= mounted


async def test_the_document_is_valid_and_its_references_resolve(app):
    document = json.loads(json.dumps(description(app)))
    for reference in references(document):
        assert reference.rpartition("/")[2] in document["components"]["schemas"]
    results = list(schemathesis.openapi.from_dict(document).get_all_operations())
    assert [result for result in results if not hasattr(result, "ok")] == []
    names = [operation["operationId"] for operation in operations(document).values()]
    assert len(set(names)) == len(names)


async def test_the_chat_bodys_schema_has_the_fields_that_are_read(app):
    document = description(app)
    body = operations(document)["post", "/v1/chat/completions"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ChatBody"
    }
    chat = document["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"]
    assert {"n", "logprobs", "top_logprobs", "logit_bias", "response_format"} <= chat[
        "properties"
    ].keys()


async def test_operations_with_security_are_those_that_refuse_without_the_key(api):
    locked = api.with_options(admin_api_key="k")
    app = _app(locked.client, {"model_name": "fake", "admin_api_key": "k"})
    locked.app = app
    for (method, path), operation in operations(description(app)).items():
        url = path.replace("{request_id}", "x").replace("{name}", "x")
        if path in ("/health_generate", "/v1/audio/voices", "/v1/audio/voices/{name}"):
            continue  # they change state, or depend on this machine
        response = await locked.call(method.upper(), url, b"{}")
        assert (response.status_code == 401) == ("security" in operation), (method, path)


@pytest.mark.parametrize("path", ["/docs", "/docs/oauth2-redirect", "/redoc"])
async def test_the_page_loads_nothing_external(api, path):
    response = await api.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"https?://|//cdn|innerHTML", PAGE)
    assert 'fetch("/openapi.json")' in PAGE
