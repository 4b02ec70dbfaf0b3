"""Admin operations on the stages: the table of routes, the admin key, and /model_info.

Invariant: fields that a body omits are sent to the stages with their defaults; fields that are null
are not sent, nor are `stages` and `timeout_s` (note:api-server 2). A failed operation is a 400
whose `detail` is the complete aggregate; a timeout is a 504, an unknown stage a 400. A body that is
not JSON is a 422; after that, the key is checked before any field (2.1). Keys are compared in
constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, error_message, json_response
from omni_proxy.replica.api.common.lenient_decode import MISSING, json_body, validate
from omni_proxy.replica.api.route_context import RouteContext

MODEL_INFO_TIMEOUT_SECS = 30.0
SHARED_FACTS = ("weight_version", "model_path", "load_format")
# Values for trainers, read from the first stage that has weights.
MODEL_FACTS = ("weight_sync", "dtype", "kv_cache_dtype", "cache_epoch", "disable_radix_cache")
KV_FACTS = "kv_transfer"  # of prefill and decode replicas
PAUSED_COUNT = "num_paused_requests"
DEFAULT_ERROR_STATUS = 400

View = Callable[[], Awaitable[Response]]


class OperationBody(Struct, kw_only=True):
    """Fields of every operation's body; the fields of subclasses are the payload."""

    stages: list[str] | None = None
    timeout_s: float | None = None

    def payload(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        common_fields = OperationBody.__struct_fields__
        return {
            key: fields[key]
            for key in fields
            if key not in common_fields and fields[key] is not None
        }

    def limit_secs(self, default_secs: float) -> float:
        """How long to wait for the stages' results."""
        return default_secs if self.timeout_s is None else self.timeout_s


class Pause(OperationBody, kw_only=True):
    mode: str | None = "abort"


class Continue(OperationBody, kw_only=True):
    torch_empty_cache: bool | None = True


def with_status(aggregate: dict[str, Any]) -> dict[str, Any]:
    """A successful aggregate with the additional keys that SGLang's clients read."""
    counts = [
        result["data"][PAUSED_COUNT]
        for result in aggregate["results"]
        if PAUSED_COUNT in result["data"]
    ]
    return aggregate | {"status": "ok"} | ({PAUSED_COUNT: sum(counts)} if counts else {})


@dataclass(frozen=True, slots=True)
class OperationRoute:
    """POST `path`: runs the action of that name on the stages, with a default timeout.

    If no body is needed, a missing one counts as empty. `top` adds keys to a successful response.
    """

    path: str
    body: type[OperationBody]
    timeout_secs: float
    body_needed: bool = True
    top: Callable[[dict[str, Any]], dict[str, Any]] = with_status

    @property
    def action(self) -> str:
        return self.path.removeprefix("/")


ROUTES = (
    OperationRoute("/pause_generation", Pause, 60.0),
    OperationRoute("/continue_generation", Continue, 60.0),
)


def require_key(context: RouteContext) -> None:
    """Raises DetailError 401 if the admin key is missing or malformed, 403 if it is wrong."""
    if not context.admin_api_key:
        return
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    # Quart decodes header bytes as latin-1: encode them back to the bytes that were sent.
    sent_key = token.strip().encode("latin-1", "replace")
    if scheme.lower() != "bearer" or not sent_key:
        message = "Admin API key required: Authorization: Bearer <key>"
        raise DetailError(401, message, {"www-authenticate": "Bearer"})
    if not hmac.compare_digest(sent_key, context.admin_api_key.encode()):
        raise DetailError(403, "Invalid admin API key")


async def admin_body(context: RouteContext) -> Any:
    """Return the JSON value of an authorized admin request, or MISSING; pass it to `validate`."""
    body = await json_body()
    require_key(context)
    return body


def operation_view(context: RouteContext, route: OperationRoute) -> View:
    async def view() -> Response:
        payload = await admin_body(context)
        body = validate(route.body, {} if payload is MISSING and not route.body_needed else payload)
        return json_response(route.top(await run_operation(context, route, body)))

    return view


async def run_operation(
    context: RouteContext, route: OperationRoute, body: OperationBody
) -> dict[str, Any]:
    """Return the aggregate of an operation that succeeded; raises DetailError with a failed one.

    The status is 400, or the one in a stage's `data` (409: another trainer is active).
    """
    limit_secs = body.limit_secs(route.timeout_secs)
    aggregate = await context.client.admin(route.action, body.payload(), body.stages, limit_secs)
    if not aggregate["success"]:
        statuses = [
            result["data"].get("status_code", DEFAULT_ERROR_STATUS)
            for result in aggregate["results"]
        ]
        raise DetailError(max(statuses, default=DEFAULT_ERROR_STATUS), aggregate)
    return aggregate


class ModelInfoRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def get(self) -> Response:
        require_key(self._context)
        return await self._respond(OperationBody())

    async def post(self) -> Response:
        return await self._respond(validate(OperationBody, await admin_body(self._context)))

    async def _respond(self, body: OperationBody) -> Response:
        limit_secs = MODEL_INFO_TIMEOUT_SECS if body.timeout_s is None else body.timeout_s
        aggregate = await self._context.client.admin("model_info", {}, body.stages, limit_secs)
        if not aggregate["success"]:
            raise DetailError(400, aggregate)
        facts = model_facts(aggregate)
        if len(facts.versions) > 1:
            raise DetailError(409, _mixed(aggregate, facts.versions))
        return json_response(aggregate | facts.shared | {"stages": aggregate["results"]})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the model, combined from the stages.

    `shared` are values that are equal at all stages with weights, else None; `versions` are those
    of all stages. MODEL_FACTS are those of the first stage with weights: a pipeline has only one
    model that trainers update.
    """

    shared: dict[str, Any]
    versions: list[str]
    stages: list[dict[str, Any]]


def model_facts(aggregate: dict[str, Any]) -> ModelFacts:
    results = [result for result in aggregate["results"] if not result["data"].get("skipped")]
    shared = {}
    for name in SHARED_FACTS:
        values = [result["data"].get(name) for result in results]
        agreed = values and all(value == values[0] for value in values)
        shared[name] = values[0] if agreed else None
    trained = (result["data"] for result in results if result["data"].get(MODEL_FACTS[0]))
    model: dict[str, Any] = next(trained, {})
    shared |= {name: model.get(name) for name in MODEL_FACTS}
    shared |= {KV_FACTS: model[KV_FACTS]} if KV_FACTS in model else {}
    versions = {result["data"].get("weight_version") for result in results} - {None}
    return ModelFacts(shared, sorted(map(str, versions)), results)


def _mixed(aggregate: dict[str, Any], versions: list[str]) -> dict[str, Any]:
    stages = [
        result["data"] | {"stage": result["stage"], "success": result["success"]}
        for result in model_facts(aggregate).stages
    ]
    return {
        "success": False,
        "message": "mixed stage weight_version",
        "mixed_state": {"weight_version": versions},
        "stages": stages,
        "admin": aggregate,
    }


def add_admin_envelope(app: QuartTrio, paths: Collection[str]) -> None:
    """Add `success`, `message` and `status`, which trainers read, to JSON errors of `paths`.

    The contract's own keys (`detail`, `error`) are unchanged (note:api-server 9.1).
    """

    async def add(response: Response) -> Response:
        if response.status_code < 400 or request.path not in paths or not response.is_json:
            return response
        body = msgspec.json.decode(await response.get_data())
        message = body["error"]["message"] if "error" in body else error_message(body["detail"])
        envelope = {"success": False, "message": message, "status": "error"}
        response.set_data(msgspec.json.encode(envelope | body))
        return response

    app.after_request(add)


def mount(app: QuartTrio, context: RouteContext) -> None:
    for route in ROUTES:
        view = operation_view(context, route)
        app.add_url_rule(route.path, route.action, view, methods=["POST"])
    info = ModelInfoRoutes(context)
    app.add_url_rule("/model_info", "model_info", info.get)
    app.add_url_rule("/model_info", "model_info_of", info.post, methods=["POST"])
