"""Whether this replica serves, what it serves, and the icon that browsers ask for.

Invariant: the keys of /health and of a model's card are exactly those of api-server.md 1.1 and 1.2,
in that order. /health never waits for a stage.
"""

from __future__ import annotations

from typing import Any

from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.errors import OpenAIRefused, reply
from omni_proxy.replica.api.served import Served

INSTANCE_HEADER = "x-omni-instance"
OWNER = "sglang-omni"
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
    def __init__(self, served: Served) -> None:
        self._served = served

    async def health(self) -> Response:
        told = health_of(self._served)
        status = 200 if told["status"] == "healthy" else 503
        return reply(told, status, {INSTANCE_HEADER: self._served.instance})

    async def models(self) -> Response:
        return reply({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """The card of the one model; raises OpenAIRefused 404 for any other name."""
        if name != self._served.model_name:
            told = f"the model {name!r} does not exist; this server has {self._served.model_name!r}"
            raise OpenAIRefused(404, told, "model", "model_not_found")
        return reply(self._card())

    def _card(self) -> dict[str, Any]:
        name = self._served.model_name
        permission = {
            "id": "modelperm-default",
            "object": "model_permission",
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
        }
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": OWNER,
            "permission": [permission],
            "root": name,
        }

    async def icon(self) -> Response:
        return Response(b"", 404)


def health_of(served: Served) -> dict[str, Any]:
    """The client's health, as `starting` while the server warms up."""
    told = served.client.health()
    kept = {key: told[key] for key in HEALTH_KEYS if key in told}
    if kept.get("status") == "healthy" and served.ready is not None and not served.ready():
        kept["status"] = "starting"
    return kept


def mount(app: QuartTrio, served: Served) -> None:
    routes = HealthRoutes(served)
    app.add_url_rule("/health", "health", routes.health)
    app.add_url_rule("/v1/models", "models", routes.models)
    # A name may hold slashes; what a client encodes arrives decoded.
    app.add_url_rule("/v1/models/<path:name>", "model", routes.model)
    app.add_url_rule("/favicon.ico", "icon", routes.icon)
