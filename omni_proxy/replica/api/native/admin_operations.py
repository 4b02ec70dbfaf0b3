"""Operations on the stages over HTTP: one table of routes, and /model_info (api-server.md 2).

Invariant: what a body leaves out is sent with its default, null not at all, `stages` and
`timeout_s` never. A failed operation is a 400 whose `detail` is the whole aggregate. A timeout or
an unknown stage is told as such, not as a bare 500.
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

from omni_proxy.replica.api.common.errors import DetailError, json_response
from omni_proxy.replica.api.common.fields import MISSING, json_body, validate
from omni_proxy.replica.api.route_context import RouteContext

MODEL_INFO_TIMEOUT_SECS = 30.0
SHARED_FACTS = ("weight_version", "model_path", "load_format")
# What a trainer plans by; of the first stage that has weights.
MODEL_FACTS = ("weight_sync", "dtype", "kv_cache_dtype", "cache_epoch", "disable_radix_cache")
PAUSED_COUNT = "num_paused_requests"
DEFAULT_ERROR_STATUS = 400

View = Callable[[], Awaitable[Response]]


class OperationBody(Struct, kw_only=True):
    """What every operation's body may say; its subclasses' fields are the payload."""

    stages: list[str] | None = None
    timeout_s: float | None = None

    def payload(self) -> dict[str, Any]:
        said = msgspec.structs.asdict(self)
        common = OperationBody.__struct_fields__
        return {key: said[key] for key in said if key not in common and said[key] is not None}

    def limit_secs(self, default_secs: float) -> float:
        """How long the stages' answers are waited for."""
        return default_secs if self.timeout_s is None else self.timeout_s


class Pause(OperationBody, kw_only=True):
    mode: str | None = "abort"


class Continue(OperationBody, kw_only=True):
    torch_empty_cache: bool | None = True


def with_status(aggregate: dict[str, Any]) -> dict[str, Any]:
    """An aggregate that succeeded, with what sglang's clients look for beside it."""
    counts = [
        each["data"][PAUSED_COUNT] for each in aggregate["results"] if PAUSED_COUNT in each["data"]
    ]
    return aggregate | {"status": "ok"} | ({PAUSED_COUNT: sum(counts)} if counts else {})


@dataclass(frozen=True, slots=True)
class OperationRoute:
    """POST `path`: the stages' action of that name, with a time limit where the body sets none.

    Where no body is needed, none is as good as an empty one. `top` is told of a success.
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
    """Raises DetailError 401 where a due key is missing or malformed, 403 where it is wrong."""
    if not context.admin_api_key:
        return
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    # Header bytes are decoded as latin-1: this gives back what came over the wire.
    given = token.strip().encode("latin-1", "replace")
    if scheme.lower() != "bearer" or not given:
        told = "Admin API key required: Authorization: Bearer <key>"
        raise DetailError(401, told, {"www-authenticate": "Bearer"})
    if not hmac.compare_digest(given, context.admin_api_key.encode()):
        raise DetailError(403, "Invalid admin API key")


async def admin_body(context: RouteContext) -> Any:
    """The JSON value of an admin request that may be served, or MISSING; to be given to `read`."""
    body = await json_body()
    require_key(context)
    return body


def operation_view(context: RouteContext, route: OperationRoute) -> View:
    async def view() -> Response:
        given = await admin_body(context)
        body = validate(route.body, {} if given is MISSING and not route.body_needed else given)
        return json_response(route.top(await run_operation(context, route, body)))

    return view


def error_message(detail: Any) -> str:
    """What a refusal's `detail` says: words, an aggregate, or a list of problems."""
    if isinstance(detail, dict):
        return str(detail["message"])
    if isinstance(detail, list):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in detail)
    return str(detail)


async def run_operation(
    context: RouteContext, route: OperationRoute, body: OperationBody
) -> dict[str, Any]:
    """The aggregate of an operation that succeeded; raises DetailError with that of any other.

    400, or what a stage's `data` says (409: another trainer is in the way).
    """
    limit_secs = body.limit_secs(route.timeout_secs)
    aggregate = await context.client.admin(route.action, body.payload(), body.stages, limit_secs)
    if not aggregate["success"]:
        told = [
            each["data"].get("status_code", DEFAULT_ERROR_STATUS) for each in aggregate["results"]
        ]
        raise DetailError(max(told, default=DEFAULT_ERROR_STATUS), aggregate)
    return aggregate


class ModelInfoRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def get(self) -> Response:
        require_key(self._context)
        return await self._answer(OperationBody())

    async def post(self) -> Response:
        return await self._answer(validate(OperationBody, await admin_body(self._context)))

    async def _answer(self, asked: OperationBody) -> Response:
        limit_secs = MODEL_INFO_TIMEOUT_SECS if asked.timeout_s is None else asked.timeout_s
        aggregate = await self._context.client.admin("model_info", {}, asked.stages, limit_secs)
        if not aggregate["success"]:
            raise DetailError(400, aggregate)
        facts = model_facts(aggregate)
        if len(facts.versions) > 1:
            raise DetailError(409, _mixed(aggregate, facts.versions))
        return json_response(aggregate | facts.shared | {"stages": aggregate["results"]})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`shared`: what all stages that have weights agree on, else None; `versions` of all.

    MODEL_FACTS are the first stage's: one pipeline has one model that trainers reach.
    """

    shared: dict[str, Any]
    versions: list[str]
    stages: list[dict[str, Any]]


def model_facts(aggregate: dict[str, Any]) -> ModelFacts:
    told = [each for each in aggregate["results"] if not each["data"].get("skipped")]
    shared = {}
    for name in SHARED_FACTS:
        values = [each["data"].get(name) for each in told]
        shared[name] = values[0] if values and all(each == values[0] for each in values) else None
    trained = (each["data"] for each in told if each["data"].get(MODEL_FACTS[0]))
    model: dict[str, Any] = next(trained, {})
    shared |= {name: model.get(name) for name in MODEL_FACTS}
    versions = {each["data"].get("weight_version") for each in told} - {None}
    return ModelFacts(shared, sorted(map(str, versions)), told)


def _mixed(aggregate: dict[str, Any], versions: list[str]) -> dict[str, Any]:
    stages = [
        each["data"] | {"stage": each["stage"], "success": each["success"]}
        for each in model_facts(aggregate).stages
    ]
    return {
        "success": False,
        "message": "mixed stage weight_version",
        "mixed_state": {"weight_version": versions},
        "stages": stages,
        "admin": aggregate,
    }


def add_admin_envelope(app: QuartTrio, paths: Collection[str]) -> None:
    """Add `success`, `message` and `status` to JSON errors of `paths`, where trainers read them.

    The contract's own keys (`detail`, `error`) stay as they are (api-server.md 9.1).
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
