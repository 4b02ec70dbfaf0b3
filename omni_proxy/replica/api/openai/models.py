"""GET /v1/models: the card of the one model that this server has (api-server.md 1.2).

Invariant: the keys of a card are those of the contract, in its order.
"""

from __future__ import annotations

from typing import Any

from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import OpenAIError, json_response
from omni_proxy.replica.api.route_context import RouteContext

OWNER = "sglang-omni"


class ModelListRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def list_models(self) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def get_model(self, name: str) -> Response:
        """Return the card of the one model; raises OpenAIError 404 for any other name."""
        if name != self._context.model_name:
            message = (
                f"the model {name!r} does not exist; this server has {self._context.model_name!r}"
            )
            raise OpenAIError(404, message, "model", "model_not_found")
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        name = self._context.model_name
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


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = ModelListRoutes(context)
    app.add_url_rule("/v1/models", "models", routes.list_models)
    # A name may contain slashes; the router gives it percent-decoded.
    app.add_url_rule("/v1/models/<path:name>", "model", routes.get_model)
