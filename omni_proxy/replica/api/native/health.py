"""GET /health and the icon that browsers request.

Invariant: the keys of /health are exactly those of api-server.md 1.1, in that order. It never waits
for a stage.
"""

from __future__ import annotations

from typing import Any

from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import json_response
from omni_proxy.replica.api.route_context import RouteContext

INSTANCE_HEADER = "x-omni-instance"
HEALTH_KEYS = (
    "status",
    "running",
    "stages",
    "entry_stage",
    "total_requests",
    "pending_completions",
    "request_states",
    "stream_delivery",
)


class HealthRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def health(self) -> Response:
        report = health_report(self._context)
        status = 200 if report["status"] == "healthy" else 503
        return json_response(report, status, {INSTANCE_HEADER: self._context.instance})

    async def icon(self) -> Response:
        return Response(b"", 404)


def health_report(context: RouteContext) -> dict[str, Any]:
    """The client's health; `starting` while the server warms up."""
    report = context.client.health()
    public = {key: report[key] for key in HEALTH_KEYS if key in report}
    if public.get("status") == "healthy" and context.ready is not None and not context.ready():
        public["status"] = "starting"
    return public


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = HealthRoutes(context)
    app.add_url_rule("/health", "health", routes.health)
    app.add_url_rule("/favicon.ico", "icon", routes.icon)
