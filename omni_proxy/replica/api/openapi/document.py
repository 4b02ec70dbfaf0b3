"""GET /openapi.json, /docs and /redoc: this server's routes, described (api-server.md 1.0).

Invariant: what is described is what is mounted: paths and methods are asked of the app itself, when
the description is first asked for. An endpoint that the table does not know is a fault of ours that
a test finds. The description needs no key and tells nothing of the models behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from quart import Response
from quart_trio import QuartTrio

from omni_proxy import __version__
from omni_proxy.replica.api.common.errors import json_response
from omni_proxy.replica.api.openapi.docs_page import PAGE, POLICY
from omni_proxy.replica.api.openapi.endpoint_table import ENDPOINTS, FORM, JSON, Endpoint, Schema
from omni_proxy.replica.api.route_context import RouteContext

# Routes of the description itself, and what no client calls.
HIDDEN = frozenset(("openapi", "docs", "docs_oauth2_redirect", "redoc", "icon"))
REF = "#/components/schemas/{name}"
TITLE = "sglang-omni"
ABOUT = (
    "An inference server: chat, speech and transcription. Speech sessions over WebSocket, "
    "/v1/audio/speech/stream, have no place in this format."
)
KEY = "The admin key. Where the server has none, every route is open."
LARGEST = 2**63 - 1
ERRORS: dict[str, Schema] = {
    "Detail": {
        "type": "object",
        "properties": {"detail": {}},
        "required": ["detail"],
    },
    "NoVoice": {
        "type": "object",
        "properties": {"success": {"const": False}, "error": {"type": "string"}},
        "required": ["success", "error"],
    },
    "OpenAIError": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": ["string", "null"]},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "integer", "null"]},
                },
                "required": ["message"],
            }
        },
        "required": ["error"],
    },
}


def description(app: QuartTrio) -> dict[str, Any]:
    """The whole document, JSON-able."""
    paths: dict[str, dict[str, Any]] = {}
    kinds = [kind for told in ENDPOINTS.values() for kind in told.bodies]
    _, components = msgspec.json.schema_components(kinds, ref_template=REF)
    for path, method, endpoint in sorted(_mounted(app)):
        paths.setdefault(path, {})[method] = _operation(
            path, method, ENDPOINTS[endpoint], components
        )
    key = {"type": "http", "scheme": "bearer", "description": KEY}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": _plain(components) | ERRORS,
            "securitySchemes": {"adminKey": key},
        },
    }


def _mounted(app: QuartTrio) -> Iterator[tuple[str, str, str]]:
    """(path, method, endpoint) of all that is served over HTTP, but for what is hidden."""
    for rule in app.url_map.iter_rules():
        if rule.websocket or rule.endpoint in HIDDEN:
            continue
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule)
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            yield path, method.lower(), rule.endpoint


def _operation(
    path: str, method: str, told: Endpoint, components: dict[str, Any]
) -> dict[str, Any]:
    takes_body = method != "get" and bool(told.bodies or told.body)
    operation: dict[str, Any] = {
        "tags": [told.tag],
        "summary": told.summary,
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "responses": _responses(told),
    }
    parameters = [_parameter(name, "path") for name in re.findall(r"{(\w+)}", path)]
    if method == "get":
        parameters += [_parameter(name, "query") for name in told.query]
    if parameters:
        operation["parameters"] = parameters
    if takes_body:
        schema = _form_of(told, components) if told.takes == FORM else _body_of(told)
        content = {told.takes: {"schema": schema}}
        operation["requestBody"] = {"required": told.body_needed, "content": content}
    if told.locked:
        operation["security"] = [{"adminKey": []}]
    return operation


def _body_of(told: Endpoint) -> Schema:
    if told.body is not None:
        return told.body
    references = [{"$ref": REF.format(name=kind.__name__)} for kind in told.bodies]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _form_of(told: Endpoint, components: dict[str, Any]) -> Schema:
    """A form's files and plain fields, which stand side by side."""
    form = told.body or {"type": "object", "properties": {}}
    fields = dict(form["properties"])
    for kind in told.bodies:
        fields |= components[kind.__name__]["properties"]
    plain: Schema = _plain(form | {"properties": fields})
    return plain


def _responses(told: Endpoint) -> dict[str, Any]:
    refusals = [{"$ref": REF.format(name=name)} for name in told.refuses]
    refusal = refusals[0] if len(refusals) == 1 else {"anyOf": refusals}
    return {
        "200": {"description": "the answer", "content": {each: {} for each in told.answers}},
        "default": {
            "description": "refused",
            "content": {JSON: {"schema": refusal}},
        },
    }


def _parameter(name: str, place: str) -> dict[str, Any]:
    needed = place == "path"
    return {"name": name, "in": place, "required": needed, "schema": {"type": "string"}}


def _plain(schema: Any) -> Any:
    """The same without bounds that are those of 64 bits alone."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _plain(value)
        for name, value in schema.items()
        if not (name in ("minimum", "maximum") and abs(value) >= LARGEST)
    }


def mount(app: QuartTrio, _: RouteContext) -> None:
    made: list[dict[str, Any]] = []

    async def openapi() -> Response:
        if not made:  # only now every route is mounted
            made.append(description(app))
        return json_response(made[0])

    async def page() -> Response:
        headers = {"content-security-policy": POLICY}
        return Response(PAGE, 200, headers, content_type="text/html; charset=utf-8")

    app.add_url_rule("/openapi.json", "openapi", openapi)
    app.add_url_rule("/docs", "docs", page)
    # Where a page with a login of its own would come back to; there is none.
    app.add_url_rule("/docs/oauth2-redirect", "docs_oauth2_redirect", page)
    app.add_url_rule("/redoc", "redoc", page)
