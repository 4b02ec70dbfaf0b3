"""How the weights of the fleet stand, and the way back in for workers that nobody is sure of.

Invariant: nothing brings an uncertain worker back unless somebody says that he knows.
"""

from __future__ import annotations

from quart import Quart, Response, request

from omni_proxy.admin_api.responses import body_bytes, json_object, reply
from omni_proxy.admin_api.routes.broadcast_routes import (
    caller,
    refuse_no_object,
    shown,
    worker_headers,
)
from omni_proxy.admin_api.routes.models_routes import passed_on
from omni_proxy.admin_api.services import Services
from omni_proxy.admin_ops.routes import RESOLVES, ROLLBACK
from omni_proxy.weight_sync.worker_calls import AdminCall
from omni_proxy.wire.errors import HttpError


class WeightRoutes:
    def __init__(self, rooms: Services) -> None:
        self._rooms = rooms

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/weights", "weights", self.show)
        for path in RESOLVES:
            name = path[1:].replace("/", "_")
            app.add_url_rule(path, name, self.resolve, methods=["POST"])

    async def show(self) -> Response:
        return reply(self._rooms.desk.status())

    async def resolve(self) -> Response:
        body = await json_object()
        if body.get("acknowledge") is not True:
            message = (
                "uncertain workers may have old, new or mixed weights: verify them, then send "
                '{"acknowledge": true}'
            )
            raise HttpError(422, message, "not_acknowledged", detail=message)
        headers = {"content-type": "application/json", **passed_on(request.headers)}
        return shown(await self._rooms.desk.resolve(headers, caller()))


# The versions of weights that the proxy holds, and the way back to one of them.
#
# Invariant: asking which there are waits for nothing and changes nothing; both need the admin key, as
# all that has to do with weights.


class VersionRoutes:
    def __init__(self, rooms: Services) -> None:
        self._rooms = rooms

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/weights/versions", "weight_versions", self.all)
        app.add_url_rule(ROLLBACK.path, "weights_rollback", self.roll_back, methods=["POST"])

    async def all(self) -> Response:
        """The newest first."""
        holding = self._rooms.desk.version_service
        current = holding.store_service.current
        versions = holding.store_service.versions()
        number = current.number if current is not None else None
        told = [version.to_dict(current=version.number == number) for version in versions]
        return reply({**holding.status(), "current": number, "versions": told})

    async def roll_back(self) -> Response:
        """`{"version": number or label}`, by default the one before the current."""
        body = await body_bytes()
        await refuse_no_object(ROLLBACK, body)
        headers = worker_headers(body)
        call = AdminCall(ROLLBACK, "POST", ROLLBACK.path, body, headers, None, caller())
        # Before it waits for its turn: what is not there now will not be there then.
        await self._rooms.desk.rollback_source.find_version(call)
        return shown(await self._rooms.desk.submit(call))
