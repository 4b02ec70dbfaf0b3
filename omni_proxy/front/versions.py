"""The versions of weights that the proxy holds, and the way back to one of them.

Invariant: asking which there are waits for nothing and changes nothing; both need the admin key, as
all that has to do with weights.
"""

from __future__ import annotations

from quart import Quart, Response

from omni_proxy.control.routes import ROLLBACK
from omni_proxy.front.admin import caller, refuse_no_object, shown, worker_headers
from omni_proxy.front.replies import body_bytes, reply
from omni_proxy.front.rooms import Rooms
from omni_proxy.weights.work import AdminCall


class VersionRoutes:
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/weights/versions", "weight_versions", self.all)
        app.add_url_rule(ROLLBACK.path, "weights_rollback", self.roll_back, methods=["POST"])

    async def all(self) -> Response:
        """The newest first."""
        holding = self._rooms.desk.holding
        current = holding.shelf.current
        versions = holding.shelf.versions()
        number = current.number if current is not None else None
        told = [version.told(current=version.number == number) for version in versions]
        return reply({**holding.status(), "current": number, "versions": told})

    async def roll_back(self) -> Response:
        """`{"version": number or label}`, by default the one before the current."""
        body = await body_bytes()
        await refuse_no_object(ROLLBACK, body)
        headers = worker_headers(body)
        call = AdminCall(ROLLBACK, "POST", ROLLBACK.path, body, headers, None, caller())
        # Before it waits for its turn: what is not there now will not be there then.
        await self._rooms.desk.holding.source.wanted(call)
        return shown(await self._rooms.desk.submit(call))
