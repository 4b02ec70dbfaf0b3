"""Weight routes: state, resolve, stored versions, rollback.

Invariant: an unverified worker returns only if an operator confirms its weights. GET waits for
nothing and changes nothing. All routes need the admin key.
"""

from __future__ import annotations

from quart import Quart, Response, request

from omni_proxy.admin_api.access.key_check import caller
from omni_proxy.admin_api.forwarded_request import forwarded_headers, worker_headers
from omni_proxy.admin_api.responses import body_bytes, json_object, json_response
from omni_proxy.admin_api.routes.operations.weight_update_routes import refuse_no_object, shown
from omni_proxy.admin_api.serializers.weight_status import weight_status
from omni_proxy.admin_ops.admin_route_table import ABORT_SYNC, RESOLVES, ROLLBACK
from omni_proxy.weight_sync.weight_operations import WeightOperations
from omni_proxy.weight_sync.worker_calls import AdminCall
from omni_proxy.wire.errors import HttpError


class WeightStateRoutes:
    def __init__(self, weight_operations: WeightOperations) -> None:
        self._weight_operations = weight_operations

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/weights", "weights", self.show)
        for path in RESOLVES:
            name = path[1:].replace("/", "_")
            app.add_url_rule(path, name, self.resolve, methods=["POST"])
        app.add_url_rule(ABORT_SYNC, "abort_sync", self.abort_sync, methods=["POST"])

    async def show(self) -> Response:
        return json_response(weight_status(self._weight_operations))

    async def abort_sync(self) -> Response:
        return shown(await self._weight_operations.sync.abort(caller()))

    async def resolve(self) -> Response:
        body = await json_object()
        if body.get("acknowledge") is not True:
            message = (
                "uncertain workers may have old, new or mixed weights: verify them, then send "
                '{"acknowledge": true}'
            )
            raise HttpError(422, message, "not_acknowledged", detail=message)
        headers = {"content-type": "application/json", **forwarded_headers(request.headers)}
        return shown(await self._weight_operations.resolve(headers, caller()))


class WeightVersionRoutes:
    def __init__(self, weight_operations: WeightOperations) -> None:
        self._weight_operations = weight_operations

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/weights/versions", "weight_versions", self.all)
        app.add_url_rule(ROLLBACK.path, "weights_rollback", self.roll_back, methods=["POST"])

    async def all(self) -> Response:
        """The newest first."""
        holding = self._weight_operations.version_service
        current = holding.store_service.current
        versions = holding.store_service.versions()
        number = current.number if current is not None else None
        records = [version.to_dict(current=version.number == number) for version in versions]
        return json_response({**holding.status(), "current": number, "versions": records})

    async def roll_back(self) -> Response:
        """`{"version": number or label}`, by default the one before the current."""
        body = await body_bytes()
        await refuse_no_object(ROLLBACK, body)
        headers = worker_headers(body)
        call = AdminCall(ROLLBACK, "POST", ROLLBACK.path, body, headers, None, caller())
        # Checked before the operation is queued, so that a missing version fails immediately.
        await self._weight_operations.rollback_source.find_version(call)
        return shown(await self._weight_operations.submit(call))
