"""GET /keys: the callers of model routes, their limits and what they have used."""

from __future__ import annotations

from quart import Quart, Response

from omni_proxy.admin_api.responses import json_response
from omni_proxy.admin_api.serializers.key_records import key_records, key_refusals
from omni_proxy.admin_api.services import Services


class KeyRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/keys", "keys", self.show)

    async def show(self) -> Response:
        services = self._services
        return json_response(
            {
                "keys": key_records(services),
                **key_refusals(services),
                "error": services.keys_error() or None,
            }
        )
