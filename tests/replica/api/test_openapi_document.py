import json
import re

import pytest
import schemathesis

from omni_proxy.replica.api.openapi_document import HIDDEN, PAGE, description
from omni_proxy.replica.api.openapi_endpoints import ENDPOINTS
from omni_proxy.replica.pipeline.http_server import _app


@pytest.fixture
def app(world):
    """The app as `launch_server` builds it, with the profiler's routes."""
    return _app(world.client, {"model_name": "fake"})


def references(value):
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def operations(document):
    return {
        (method, path): reported
        for path, methods in document["paths"].items()
        for method, reported in methods.items()
    }


async def test_the_description_is_served_at_openapi_json(world):
    answer = await world.get("/openapi.json")
    assert answer.status_code == 200
    document = await answer.get_json()
    assert document["openapi"].startswith("3.")
    assert document["info"]["title"] == "sglang-omni"
    for path in (
        "/v1/chat/completions", "/health", "/v1/models", "/generate", "/v1/audio/speech",
        "/pause_generation", "/weights_checker",
    ):  # fmt: skip
        assert path in document["paths"], path


async def test_every_route_is_described_and_nothing_else_is(app):
    served = {
        (method.lower(), re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        if not rule.websocket and rule.endpoint not in HIDDEN
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    assert operations(description(app)).keys() == served
    mounted = {rule.endpoint for rule in app.url_map.iter_rules()}
    assert ENDPOINTS.keys() <= mounted


async def test_it_is_sound_and_its_references_lead_somewhere(app):
    document = json.loads(json.dumps(description(app)))
    for reference in references(document):
        assert reference.rpartition("/")[2] in document["components"]["schemas"]
    found = list(schemathesis.openapi.from_dict(document).get_all_operations())
    assert [each for each in found if not hasattr(each, "ok")] == []
    names = [reported["operationId"] for reported in operations(document).values()]
    assert len(set(names)) == len(names)


async def test_a_chats_body_is_described_as_it_is_read(app):
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


async def test_what_needs_the_key_is_what_refuses_without_one(world):
    closed = world.with_options(admin_api_key="k")
    app = _app(closed.client, {"model_name": "fake", "admin_api_key": "k"})
    closed.app = app
    for (method, path), reported in operations(description(app)).items():
        filled = path.replace("{request_id}", "x").replace("{name}", "x")
        if path in ("/health_generate", "/v1/audio/voices", "/v1/audio/voices/{name}"):
            continue  # they change state, or depend on this machine
        answer = await closed.call(method.upper(), filled, b"{}")
        assert (answer.status_code == 401) == ("security" in reported), (method, path)


@pytest.mark.parametrize("path", ["/docs", "/docs/oauth2-redirect", "/redoc"])
async def test_the_page_loads_nothing_external(world, path):
    answer = await world.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|//cdn|innerHTML", PAGE)
    assert 'fetch("/openapi.json")' in PAGE
