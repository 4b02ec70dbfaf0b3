"""Weight routes: updates, pauses, adapters and other routes of `admin_route_table`, each sent to
every worker that is not dead (note:omni-router 11); the state, stored versions, resolve and
rollback.

Invariants: nothing is sent before the whole request is validated; workers get the client's bytes
(except for `with_defaults`), or the same call in the dialect of their engine. Every response of a
route of the table, also one to a missing key, has `success`, `message` and `status` at its top
level. An unverified worker returns only if an operator confirms its weights. GET /weights and
/weights/versions wait for nothing and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import msgspec
import trio
from quart import Quart, Response, request
from werkzeug.exceptions import MethodNotAllowed, NotFound
from werkzeug.routing import PathConverter, ValidationError

from omni_proxy.admin_api.access.key_check import caller
from omni_proxy.admin_api.forwarded_request import forwarded_headers, target_of, worker_headers
from omni_proxy.admin_api.responses import body_bytes, json_object, json_response
from omni_proxy.admin_api.selector_resolution import SelectorResolver
from omni_proxy.admin_api.serializers.weight_status import weight_status
from omni_proxy.admin_ops import results
from omni_proxy.admin_ops.admin_route_table import (
    ABORT_SYNC,
    READ_METHODS,
    RESOLVES,
    ROLLBACK,
    ROUTES,
    TOPPED,
    AdminRoute,
    control_route,
)
from omni_proxy.admin_ops.engine_dialects import (
    FROM_DISTRIBUTED,
    FROM_TENSOR,
    WEIGHTS_BY_NAME,
    with_defaults,
)
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.weight_sync.weight_operations import WeightOperations
from omni_proxy.weight_sync.worker_calls import AdminCall
from omni_proxy.wire.errors import HttpError, bad_request

NO_TENSORS = {
    "error": {
        "message": "This weight update path is not yet implemented. Use /update_weights_from_disk "
        "for the disk-based update path.",
        "code": "not_implemented",
    }
}
CONFIGURED = "/<control_route:path>"
ADAPTER_ROUTES = frozenset(
    f"{version}/{verb}_lora_adapter" for version in ("", "/v1") for verb in ("load", "unload")
)
ELSEWHERE = ("/flush_cache",)  # served by `engine_routes`
NO_OBJECT = "request body must be a JSON object"
LISTS = ("names", "dtypes", "shapes")
LARGE_BYTES = 256 * 1024  # a body that takes too long to parse in one turn of the event loop
View = Callable[[], Awaitable[Response]]


class BroadcastRoutes:
    """`refresh_adapters`: called after an adapter has been loaded or unloaded."""

    def __init__(
        self,
        weight_operations: WeightOperations,
        config_store: ConfigStore,
        selectors: SelectorResolver,
        refresh_adapters: Callable[[], Awaitable[None]],
    ) -> None:
        self._weight_operations = weight_operations
        self._config_store = config_store
        self._selectors = selectors
        self._refresh_adapters = refresh_adapters

    def mount(self, app: Quart) -> None:
        app.after_request(self.with_top_keys)
        for route in ROUTES:
            if route.path not in ELSEWHERE:
                view = self._view(route)
                app.add_url_rule(route.path, route.name, view, methods=list(route.methods))
        app.url_map.converters["control_route"] = _converter(self._config_store)
        methods = list(READ_METHODS)
        app.add_url_rule(CONFIGURED, "control_route", self.configured, methods=methods)

    async def configured(self, path: str) -> Response:
        """A route of [[control_routes]]."""
        route = control_route(self._config_store.config, f"/{path}")
        if route is None:
            raise NotFound
        if request.method not in route.methods:
            raise MethodNotAllowed(route.methods)
        return shown(await self._weight_operations.submit(await self.call(route)))

    async def with_top_keys(self, response: Response) -> Response:
        """Add the top-level keys to all refusals of these routes."""
        if response.status_code < 400 or request.path not in TOPPED:
            return response
        raw = await response.get_data(as_text=False)
        # The body may have the results of all workers: only its top level is decoded.
        if "success" not in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]):
            payload = json.loads(raw)
            error = payload.get("error", {})
            message = error.get("message") or str(payload.get("detail"))
            top = {"success": False, "message": message, "status": "error"}
            response.set_data(msgspec.json.encode({**top, **payload}))
        return response

    def _view(self, route: AdminRoute) -> View:
        async def operate() -> Response:
            if route.path == FROM_TENSOR:
                return json_response(NO_TENSORS, 501)
            reply = await self._weight_operations.submit(await self.call(route))
            if route.path in ADAPTER_ROUTES:
                await self._refresh_adapters()
            if route.path == WEIGHTS_BY_NAME:
                return json_response(*results.merge_weights_by_name(reply), dict(reply.headers))
            return shown(reply)

        return operate

    async def call(self, route: AdminRoute) -> AdminCall:
        """The request as an operation. Raises HttpError 400."""
        body = await body_bytes() if request.method == "POST" else b""
        await refuse_no_object(route, body)
        body = with_defaults(route.path, body)
        return AdminCall(
            route,
            request.method,
            target_of(route.path),
            body,
            worker_headers(body),
            await self._selectors.urls(request.args.get("selector")),
            caller(),
        )


def _converter(config_store: ConfigStore) -> type[PathConverter]:
    class ConfiguredPath(PathConverter):
        """The current paths of [[control_routes]] only: not a catch-all."""

        def to_python(self, value: str) -> str:
            if control_route(config_store.config, f"/{value}") is None:
                raise ValidationError
            return value

    return ConfiguredPath


def shown(reply: AdminResponse) -> Response:
    return json_response(reply.body, reply.status, dict(reply.headers))


async def refuse_no_object(route: AdminRoute, body: bytes) -> None:
    """Refuse a body that is not a JSON object here: at the workers it would fail all of them, and
    take them out of rotation. Raises HttpError 400."""
    if len(body) < LARGE_BYTES:
        _refuse_no_object(route, body)
    else:
        await trio.to_thread.run_sync(_refuse_no_object, route, body)


def _refuse_no_object(route: AdminRoute, body: bytes) -> None:
    try:
        # The slower standard library accepts NaN, which trainers send.
        value = json.loads(body or b"{}") if len(body) < LARGE_BYTES else _lists_of(body)
    except msgspec.ValidationError:
        raise bad_request(NO_OBJECT, "invalid_json") from None
    except (ValueError, RecursionError):
        raise bad_request("invalid JSON body", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(NO_OBJECT, "invalid_json")
    if route.path == FROM_DISTRIBUTED:
        refuse_lengths(value)


def _lists_of(body: bytes) -> dict[str, object]:
    """Decode only the requested parts of a large body."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    lists = {name: fields[name] for name in LISTS if name in fields}
    return {name: _pieces(raw) for name, raw in lists.items()}


def _pieces(raw: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(raw, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        return None


def refuse_lengths(value: dict[str, object]) -> None:
    """Raises HttpError 400."""
    lists = [value.get(name) for name in LISTS]
    lengths = {len(part) if isinstance(part, list) else -1 for part in lists}
    if len(lengths) > 1 or lengths & {-1, 0}:
        raise bad_request(
            "names, dtypes and shapes must be lists of the same length, and not empty"
        )


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
