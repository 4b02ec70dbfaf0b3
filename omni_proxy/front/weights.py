"""How the weights of the fleet stand, and the way back in for workers that nobody is sure of.

Invariant: nothing brings an uncertain worker back unless somebody says that he knows.
"""

from __future__ import annotations

from quart import Quart, Response, request

from omni_proxy.control.routes import RESOLVES
from omni_proxy.front.admin import caller, shown
from omni_proxy.front.models import passed_on
from omni_proxy.front.replies import json_object, reply
from omni_proxy.front.rooms import Rooms
from omni_proxy.wire.errors import Refusal


class WeightRoutes:
    def __init__(self, rooms: Rooms) -> None:
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
            raise Refusal(422, message, "not_acknowledged", detail=message)
        headers = {"content-type": "application/json", **passed_on(request.headers)}
        return shown(await self._rooms.desk.resolve(headers, caller()))
