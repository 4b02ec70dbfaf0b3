"""GET /openapi.json: the admin API's routes as OpenAPI 3.1.

Invariant: the description is built once and has no data of this proxy, so it needs no key. The
security of each route comes from the function that checks the key.
"""

from __future__ import annotations

import re
from functools import cache

from quart import Quart, Response

from omni_proxy import __version__
from omni_proxy.admin_api.access.auth import needs_key
from omni_proxy.admin_api.openapi.routes import EVENTS, TABLE, Parameter, RouteDoc
from omni_proxy.admin_api.openapi.schemas import ANY, SCHEMAS, TEXT, Schema, ref
from omni_proxy.admin_ops.routes import TOPPED
from omni_proxy.config.schema import AdminConfig
from omni_proxy.wire.errors import to_json

JSON = "application/json"
ABOUT = (
    "The control routes of omni-proxy. Model routes are relayed to workers unchanged and are not "
    "described here. Any route may also answer 405 and 413, 500 for an internal error, 503 while "
    "the admin API restarts, and 400, 408, 414, 417, 431, 501 or 505 for a malformed request, "
    "always in the shape of `Error`."
)
KEY = (
    "`[admin] api_key` of the configuration, or else `[server] api_key`. Without one, every "
    "route is open."
)
PLACES = {
    "model": "the id of a model",
    "worker_id": "the worker's URL, encoded as one segment, or its id",
    "path": "a path of the engine, of one or more segments",
}


class OpenApiRoutes:
    def mount(self, app: Quart) -> None:
        app.add_url_rule("/openapi.json", "openapi", self.show)

    async def show(self) -> Response:
        return Response(_written(), content_type=JSON)


@cache
def _written() -> bytes:
    return to_json(description())


def description() -> dict[str, object]:
    """The document, JSON-able."""
    paths: dict[str, dict[str, object]] = {}
    for route in TABLE:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "omni-proxy", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": KEY}},
        },
    }


def _operation(route: RouteDoc) -> dict[str, object]:
    closed = needs_key(route.method.upper(), route.path, AdminConfig())
    answers = {status: _answer(content) for status, content in route.answers.items()}
    refusal = "Outcome" if route.path in TOPPED else "Error"
    for status in (*route.errors, *((401, 403) if closed else ())):
        answers[status] = _answer(refusal)
    operation: dict[str, object] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method}{route.path}").strip("_"),
        "summary": route.summary,
        "responses": {str(status): answers[status] for status in sorted(answers)},
    }
    if parameters := [*_in_path(route.path), *map(_in_query, route.query)]:
        operation["parameters"] = parameters
    if route.takes:
        operation["requestBody"] = {"content": {JSON: {"schema": ref(route.takes)}}}
    if closed:
        operation["security"] = [{"key": []}]
    return operation


def _answer(content: str) -> Schema:
    """The response's content: media types and names of schemas."""
    media: dict[str, object] = {}
    for name in content.split():
        if "/" in name:
            media[name] = {"schema": ANY if name == EVENTS else TEXT}
        else:
            media[JSON] = {"schema": ref(name)}
    text = {"Error": "refused", "Outcome": "the outcome"}.get(content, content or "nothing new")
    return {"description": text, "content": media} if media else {"description": text}


def _in_path(path: str) -> list[dict[str, object]]:
    return [
        {
            "name": name, "in": "path", "required": True, "description": PLACES[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in re.findall(r"{(\w+)}", path)
    ]  # fmt: skip


def _in_query(parameter: Parameter) -> dict[str, object]:
    return {
        "name": parameter.name,
        "in": "query",
        "description": parameter.says,
        "required": parameter.required,
        "schema": parameter.schema,
    }
