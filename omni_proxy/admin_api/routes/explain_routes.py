"""POST /explain: where a model request would be routed and why; nothing is sent.

Invariant: a large JSON body is parsed in slices, as in the data plane, so that it blocks no other
task.
"""

from __future__ import annotations

import trio
from quart import Quart, Response, request

from omni_proxy.admin_api.responses import bad_request, body_bytes, json_response
from omni_proxy.admin_api.services import Services
from omni_proxy.routing.explain import explain
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES, LargeJsonFields, walk_large_json
from omni_proxy.routing.inspect.requirements import (
    RequestFacts,
    Requirements,
    affinity_key_of,
    has_json_body,
    inspect_request,
    requirements_of_large_json,
)
from omni_proxy.routing.inspect.requirements import settle_unread as settle_large
from omni_proxy.routing.routes import MethodNotAllowed, Route, match_route
from omni_proxy.routing.voices import pin_to_voice_owner
from omni_proxy.wire.request import HINTS

DEFAULT_PATH = "/v1/chat/completions"


class ExplainRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/explain", "explain", self.show, methods=["POST"])

    async def show(self) -> Response:
        path = request.args.get("path", DEFAULT_PATH)
        try:
            route = match_route("POST", path)
        except MethodNotAllowed:
            route = None
        if route is None:
            raise bad_request(f"path {path} is no model route; try {DEFAULT_PATH}", "unknown_path")
        need = await _need_of(route, await body_bytes(), _facts())
        if need.large_body_class:
            settle_large(self._services.fleet, need)
        data_plane = self._services.data_plane
        pin_to_voice_owner(data_plane.voices, route.traffic, need)
        if data_plane.policy.needs_affinity_key:
            need.affinity_key = affinity_key_of(_lines())
        return json_response(
            explain(self._services.fleet, need, data_plane.policy, data_plane.voices.owner)
        )


async def _need_of(route: Route, body: bytes, facts: RequestFacts) -> Requirements:
    """Raises Refusal 400, as for a request of this body."""
    if len(body) > ONE_PASS_BYTES and has_json_body(route, facts):
        return requirements_of_large_json(route, await top_of(body), facts)
    return inspect_request(route, body, facts)


async def top_of(body: bytes) -> LargeJsonFields:
    """Other tasks have a turn between two slices. Raises Refusal 400."""
    walk = walk_large_json(body)
    while True:
        try:
            next(walk)
        except StopIteration as found:
            top: LargeJsonFields = found.value
            return top
        await trio.lowlevel.checkpoint()


def _lines() -> bytes:
    """The request's fields as the data_plane has them of a model request."""
    fields = (f"{name}: {value}\r\n" for name, value in request.headers)
    return "".join(fields).encode("latin-1", "replace")


def _facts() -> RequestFacts:
    """A body of unknown type is read as JSON, for that is what people will paste here."""
    content_type = request.headers.get("Content-Type", "application/json")
    if content_type == "application/x-www-form-urlencoded":  # what curl -d says of any body
        content_type = "application/json"
    hints = {
        HINTS[field]: value.encode("latin-1", "replace")
        for name, value in request.headers
        if (field := name.lower().encode("latin-1", "replace")) in HINTS
    }
    return RequestFacts(content_type.encode("latin-1", "replace"), hints)
