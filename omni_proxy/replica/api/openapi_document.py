"""GET /openapi.json, and the page for /docs and /redoc that renders it (note:api-server 1.0).

Invariant: the document describes the mounted routes: paths and methods are read from the app when
the document is first requested. A test fails for an endpoint without an entry in the table. The
document needs no key and reveals nothing about the models. The page loads only the document, from
this server, so it works offline; it inserts all content as text, never as HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from quart import Response
from quart_trio import QuartTrio

from omni_proxy import __version__
from omni_proxy.replica.api.common.errors import json_response
from omni_proxy.replica.api.openapi_endpoints import (
    ENDPOINTS,
    ENGINE_ENDPOINTS,
    FORM,
    JSON,
    Endpoint,
    Schema,
)
from omni_proxy.replica.api.route_context import RouteContext

ALL_ENDPOINTS = {**ENDPOINTS, **ENGINE_ENDPOINTS}
# Routes of the document itself, and those that no API client calls.
HIDDEN = frozenset(("openapi", "docs", "docs_oauth2_redirect", "redoc", "icon"))
REF = "#/components/schemas/{name}"
TITLE = "sglang-omni"
ABOUT = (
    "An inference server: chat, speech and transcription, with the routes of OpenAI, SGLang-Omni, "
    "SGLang and vLLM. Speech sessions over WebSocket, "
    "/v1/audio/speech/stream, cannot be described in this format."
)
KEY = "The admin key. If the server has none, every route is open."
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
POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def description(app: QuartTrio) -> dict[str, Any]:
    """Return the whole document, ready for JSON."""
    paths: dict[str, dict[str, Any]] = {}
    kinds = [kind for endpoint_entry in ALL_ENDPOINTS.values() for kind in endpoint_entry.bodies]
    _, components = msgspec.json.schema_components(kinds, ref_template=REF)
    for path, method, endpoint in sorted(_mounted(app)):
        paths.setdefault(path, {})[method] = _operation(
            path, method, ALL_ENDPOINTS[endpoint], components
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
    """Yield (path, method, endpoint) of every HTTP route that is not hidden."""
    for rule in app.url_map.iter_rules():
        if rule.websocket or rule.endpoint in HIDDEN:
            continue
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule)
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            yield path, method.lower(), rule.endpoint


def _operation(
    path: str, method: str, endpoint: Endpoint, components: dict[str, Any]
) -> dict[str, Any]:
    takes_body = method != "get" and bool(endpoint.bodies or endpoint.body)
    operation: dict[str, Any] = {
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "responses": _responses(endpoint),
    }
    parameters = [_parameter(name, "path") for name in re.findall(r"{(\w+)}", path)]
    if not takes_body:
        parameters += [_parameter(name, "query") for name in endpoint.query]
    if parameters:
        operation["parameters"] = parameters
    if takes_body:
        schema = _form_of(endpoint, components) if endpoint.takes == FORM else _body_of(endpoint)
        content = {endpoint.takes: {"schema": schema}}
        operation["requestBody"] = {"required": endpoint.body_needed, "content": content}
    if endpoint.locked:
        operation["security"] = [{"adminKey": []}]
    return operation


def _body_of(endpoint: Endpoint) -> Schema:
    if endpoint.body is not None:
        return endpoint.body
    references = [{"$ref": REF.format(name=kind.__name__)} for kind in endpoint.bodies]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _form_of(endpoint: Endpoint, components: dict[str, Any]) -> Schema:
    """A form's files and plain fields in one schema."""
    form = endpoint.body or {"type": "object", "properties": {}}
    fields = dict(form["properties"])
    for kind in endpoint.bodies:
        fields |= components[kind.__name__]["properties"]
    plain: Schema = _plain(form | {"properties": fields})
    return plain


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    error_schemas = [{"$ref": REF.format(name=name)} for name in endpoint.refuses]
    error_schema = error_schemas[0] if len(error_schemas) == 1 else {"anyOf": error_schemas}
    return {
        "200": {
            "description": "the response",
            "content": {media_type: {} for media_type in endpoint.response_types},
        },
        "default": {
            "description": "refused",
            "content": {JSON: {"schema": error_schema}},
        },
    }


def _parameter(name: str, place: str) -> dict[str, Any]:
    needed = place == "path"
    return {"name": name, "in": place, "required": needed, "schema": {"type": "string"}}


def _plain(schema: Any) -> Any:
    """The schema without bounds that are only those of 64-bit integers."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _plain(value)
        for name, value in schema.items()
        if not (name in ("minimum", "maximum") and abs(value) >= LARGEST)
    }


def mount(app: QuartTrio, _: RouteContext) -> None:
    documents: list[dict[str, Any]] = []

    async def openapi() -> Response:
        if not documents:  # at the first request, when all routes are mounted
            documents.append(description(app))
        return json_response(documents[0])

    async def page() -> Response:
        headers = {"content-security-policy": POLICY}
        return Response(PAGE, 200, headers, content_type="text/html; charset=utf-8")

    app.add_url_rule("/openapi.json", "openapi", openapi)
    app.add_url_rule("/docs", "docs", page)
    # The OAuth2 redirect target of Swagger UI; there is no login.
    app.add_url_rule("/docs/oauth2-redirect", "docs_oauth2_redirect", page)
    app.add_url_rule("/redoc", "redoc", page)


PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sglang-omni - API</title>
<style>
:root { color-scheme: light dark; --line: #8884; --faint: #888; --accent: #2a6fdb; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin: 2rem 0 .5rem; text-transform: capitalize; }
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; display: flex; gap: .8rem; align-items: baseline; flex-wrap: wrap; }
summary b { color: var(--accent); font: 600 13px ui-monospace, monospace; min-width: 3.5rem; }
summary code { font-weight: 600; }
code, td { font: 13px/1.5 ui-monospace, monospace; }
.faint { color: var(--faint); }
table { border-collapse: collapse; margin: .5rem 0 .5rem 1rem; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
p { margin: .4rem 0 .4rem 1rem; }
</style>
</head>
<body>
<h1 id="title">API</h1>
<p class="faint" id="about">Reading openapi.json</p>
<main id="routes"></main>
<noscript>This page needs JavaScript; see <a href="/openapi.json">openapi.json</a> instead.
</noscript>
<script>
"use strict";
let schemas = {};

function node(kind, text, ...children) {
  const made = document.createElement(kind);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function resolved(schema) {
  if (!schema || !schema.$ref) return schema || {};
  return schemas[schema.$ref.split("/").pop()] || {};
}

function words(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map(each => JSON.stringify(each)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(words).filter(each => each !== "null").join(" | ");
  if (schema.type === "array") return "list of " + words(schema.items || {});
  if (schema.contentMediaType) return "file";
  const bounds = [];
  if ("minimum" in schema) bounds.push("\\u2265 " + schema.minimum);
  if ("exclusiveMinimum" in schema) bounds.push("> " + schema.exclusiveMinimum);
  if ("maximum" in schema) bounds.push("\\u2264 " + schema.maximum);
  const kind = Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "any";
  return bounds.length ? kind + " (" + bounds.join(", ") + ")" : kind;
}

function fields(schema, depth) {
  const whole = resolved(schema);
  if (whole.anyOf) {
    return node("div", "", ...whole.anyOf.map(each => node("div", "", node("p", "either:"),
      fields(each, depth))));
  }
  const table = node("table");
  for (const [name, each] of Object.entries(whole.properties || {})) {
    const needed = (whole.required || []).includes(name);
    const row = node("tr", "", node("td", name), node("td", words(each)));
    const rest = needed ? "required" : each.default === undefined || each.default === null ? ""
      : "default " + JSON.stringify(each.default);
    const last = node("td", rest);
    last.className = "faint";
    row.append(last);
    table.append(row);
    const inner = each.items && each.items.$ref ? each.items
      : (each.anyOf || [each]).find(one => one.$ref);
    if (inner && depth < 3) {
      const cell = node("td", "", fields(inner, depth + 1));
      cell.colSpan = 3;
      table.append(node("tr", "", cell));
    }
  }
  return table;
}

function route(path, method, operation) {
  const head = node("summary", "", node("b", method.toUpperCase()), node("code", path),
    node("span", operation.summary));
  const made = node("details", "", head);
  if (operation.security) made.append(node("p", "Needs the admin key, if the server has one."));
  if (operation.parameters) {
    const table = node("table");
    for (const each of operation.parameters) {
      table.append(node("tr", "", node("td", each.name), node("td", each.in),
        node("td", each.required ? "required" : "")));
    }
    made.append(table);
  }
  for (const [media, body] of Object.entries((operation.requestBody || {}).content || {})) {
    made.append(node("p", "Request body: " + media), fields(body.schema, 0));
  }
  const types = Object.keys(operation.responses["200"].content || {});
  made.append(node("p", "Responses: " + types.join(", ")));
  return made;
}

async function show() {
  const response = await fetch("/openapi.json");
  const whole = await response.json();
  schemas = whole.components.schemas;
  document.getElementById("title").textContent = whole.info.title + " " + whole.info.version;
  document.getElementById("about").textContent = whole.info.description;
  const groups = {};
  for (const [path, methods] of Object.entries(whole.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      (groups[operation.tags[0]] ||= []).push(route(path, method, operation));
    }
  }
  const order = ["text", "audio", "information"];
  const names = Object.keys(groups).sort((a, b) =>
    (order.includes(a) ? order.indexOf(a) : 9) - (order.includes(b) ? order.indexOf(b) : 9));
  for (const name of names) {
    document.getElementById("routes").append(node("h2", name), ...groups[name]);
  }
}

show().catch(error => {
  document.getElementById("about").textContent = "openapi.json cannot be read: " + error;
});
</script>
</body>
</html>
"""
