"""GET /openapi.json: the admin API's routes as a table, and as OpenAPI 3.1.

Invariant: the description is built once and has no data of this proxy, so it needs no key. The
security of each route comes from the function that checks the key. A status that is not listed for
a route is one of those that every route may return (`ABOUT` lists them), or a fault of the proxy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

from quart import Quart, Response

from omni_proxy import __version__
from omni_proxy.admin_api.access.roles import needs_key, roles_for
from omni_proxy.admin_api.openapi_schemas import ANY, FLAG, SCHEMAS, TEXT, Schema, ref
from omni_proxy.admin_ops.admin_route_table import (
    ABORT_SYNC,
    ABORTS,
    RESOLVES,
    ROLLBACK,
    ROLLOUT,
    ROUTES,
    STEER_ROLLOUT,
    TOPPED,
    TRANSFER,
    AdminRoute,
)
from omni_proxy.admin_ops.engine_dialects import (
    FROM_DISTRIBUTED,
    FROM_TENSOR,
    INIT,
    MODEL_INFO,
    TRANSFER_INIT,
    WEIGHT_CHECKER,
    WEIGHT_INFO,
)
from omni_proxy.config.fields import MAX_SECS
from omni_proxy.config.schema import AdminConfig
from omni_proxy.telemetry.history import SERIES, STEPS
from omni_proxy.wire.errors import to_json

TOKEN: Final[Schema] = {"type": "string", "pattern": "^[ -~]+$", "minLength": 1}
SECONDS: Final[Schema] = {"type": "number", "minimum": 0, "maximum": MAX_SECS}
PLAIN, HTML, EVENTS = "text/plain", "text/html", "text/event-stream"
WORKER: Final = "/workers/{worker_id}"
RL_WORKER: Final = "/v1/rl/workers/{worker_id}"
ENGINE_PATHS: Final = ("/v1/rl/engine/{path}", f"{RL_WORKER}/engine/{{path}}")
CHANGE: Final = (400, 404, 412)
RL_ERRORS: Final = (400, 404, 409, 422, 502, 503)
# The refusals of every weight operation.
OPERATION: Final = dict.fromkeys((400, 404, 502, 503), "Outcome")


class Parameter(NamedTuple):
    name: str
    schema: Schema
    says: str
    required: bool = False


class RouteDoc(NamedTuple):
    """`answers`: a schema's name or a media type by status; `errors` have the common error
    shape."""

    method: str
    path: str
    summary: str
    answers: dict[int, str]
    errors: tuple[int, ...] = ()
    takes: str = ""  # the schema of the request's body
    query: tuple[Parameter, ...] = ()


SELECTOR: Final = Parameter("selector", TEXT, "narrows the workers: key=value, key in (a,b)")
DRAIN: Final = (
    Parameter("drain", FLAG, "wait until its running requests have ended"),
    Parameter("timeout_secs", SECONDS, "deadline of the drain, 0 for none"),
)
URL: Final = Parameter("url", TOKEN, "base URL of the worker, encoded or not", required=True)
WAIT: Final = Parameter(
    "timeout_secs",
    {"type": "number", "exclusiveMinimum": 0, "maximum": 7200},
    "how long to wait until it is healthy",
)
_PAST: Final = (Parameter("request_id", TOKEN, "the id in its row of /feed", required=True),)
HISTORY: Final = (
    Parameter("secs", {"type": "integer", "enum": sorted(STEPS)}, "how far back"),
    Parameter(
        "series", {"type": "string", "enum": list(SERIES)}, "comma-separated; all by default"
    ),
    Parameter("worker", TOKEN, "series of this worker instead of the fleet"),
    Parameter("by", {"const": "worker"}, "series of each worker"),
    Parameter("of", {"const": "cluster"}, "series of the fleet through all proxies of a cluster"),
)

_POOL: Final = {200: "Pool", 503: "Pool"}
_SERVER: Final = ((502, 503), "the server info of all routable workers, merged")


def _fleet() -> Iterator[RouteDoc]:
    for path in ("/live", "/liveness"):
        yield RouteDoc("get", path, "the process is up", {200: "Alive"})
    for path in ("/ready", "/readiness"):
        yield RouteDoc(
            "get", path, "a worker is routable, and the proxy is not shutting down", _POOL
        )
    yield RouteDoc("get", "/health", "a worker is healthy and not disabled", _POOL)
    yield RouteDoc(
        "get", "/status", "the program: listeners, services, data plane, fleet", {200: "Status"}
    )
    model = Parameter("model", TEXT, "only the records of its workers")
    yield RouteDoc("get", "/workers", "all workers", {200: "Workers"}, query=(model,))
    yield RouteDoc(
        "post",
        "/workers",
        "add a worker",
        {200: "Changed", 202: "Accepted"},
        (400, 409, 412),
        "NewWorker",
        (URL._replace(required=False),),
    )
    yield RouteDoc("get", WORKER, "one worker", {200: "Worker"}, (404,))
    yield RouteDoc(
        "put",
        WORKER,
        "disable, enable, kill, revive or edit a worker",
        {200: "Changed", 202: "Accepted"},
        CHANGE,
        "Switches",
    )
    yield RouteDoc(
        "patch", WORKER, "change the note on a worker", {202: "Accepted"}, CHANGE, "Remarks"
    )
    yield RouteDoc(
        "delete",
        WORKER,
        "remove a worker; its running requests complete",
        {200: "Deleted", 202: "Accepted"},
        (*CHANGE, 409),
        query=DRAIN,
    )
    yield RouteDoc(
        "post",
        f"{WORKER}/drain",
        "drain a worker: it gets no new requests; returns the number in flight",
        {200: "Changed", 202: "Changed"},
        CHANGE,
        "Deadline",
        DRAIN[1:],
    )


def _program() -> Iterator[RouteDoc]:
    yield RouteDoc("get", "/metrics", "the proxy's own metrics", {200: PLAIN}, (503,))
    yield RouteDoc("get", "/keys", "the callers of model routes and their usage", {200: "Keys"})
    yield RouteDoc(
        "post", "/keys", "add a caller by the hash of its key", {200: "KeyChanged"},
        (400, 409, 412), "NewKey",
    )  # fmt: skip
    yield RouteDoc(
        "delete", "/keys/{caller}", "remove a caller that was added over HTTP", {200: "KeyChanged"},
        (404, 409, 412),
    )  # fmt: skip
    once_flag = Parameter("once", FLAG, "one snapshot as JSON instead of an event each second")
    yield RouteDoc(
        "get",
        "/feed",
        "the state of the proxy, each second",
        {200: f"{EVENTS} Snapshot"},
        (503,),
        query=(once_flag,),
    )
    yield RouteDoc(
        "get", "/history", "series of the last hours, in steps",
        {200: "History"}, (400, 404), query=HISTORY,
    )  # fmt: skip
    yield RouteDoc("get", "/dashboard", "the dashboard", {200: HTML, 304: ""})
    yield RouteDoc("get", "/openapi.json", "this description", {200: "Fields"})
    yield RouteDoc("get", "/config", "the running configuration", {200: "Configuration"})
    yield RouteDoc("post", "/reload", "reload the file", {200: "Reloaded"}, (412, 422))
    yield RouteDoc(
        "get", "/explain", "the candidates of a request that has ended",
        {200: "PastCandidates"}, (400, 404), query=_PAST,
    )  # fmt: skip
    path = Parameter("path", TEXT, "the model route, by default /v1/chat/completions")
    yield RouteDoc(
        "post",
        "/explain",
        "where a model request would go, and why",
        {200: "Explained"},
        (400,),
        "Fields",
        (path,),
    )


def _others() -> Iterator[RouteDoc]:
    session = Parameter("session_id", TOKEN, "the id that its requests have", required=True)
    yield RouteDoc(
        "post",
        "/finish_session",
        "end a sticky session; 200 also for an unknown one",
        {200: "FinishedSession"},
        (400,),
        query=(session,),
    )
    errors = (400, 404, 405, 503)
    summary = "pick the worker for a model request that the caller sends itself"
    yield RouteDoc("post", "/select", summary, {200: "Selected"}, errors, "Selection")
    summary = "the same, and count it as in flight until it is released or its lease ends"
    path = "/select_and_reserve"
    yield RouteDoc("post", path, summary, {200: "Selected"}, (*errors, 409), "Selection")
    path = "/reservations/{reservation_id}"
    yield RouteDoc("delete", path, "end a reservation", {200: "Released"}, (404,))
    yield RouteDoc("get", "/v1/models", "the models of all workers", {200: "Models"}, (502, 503))
    summary = "one model of that list"
    yield RouteDoc("get", "/v1/models/{model}", summary, {200: "Fields"}, (404, 502, 503))
    yield RouteDoc(
        "post",
        "/add_worker",
        "add a worker once it is healthy",
        {200: PLAIN},
        (400, 409, 412),
        query=(URL, WAIT),
    )
    yield RouteDoc("post", "/remove_worker", "remove a worker", {200: PLAIN}, CHANGE, query=(URL,))
    yield RouteDoc("get", "/list_workers", "the workers' URLs", {200: "Urls"})
    yield RouteDoc(
        "get", "/health_generate", "make a worker generate a token", {200: "Generated"}, (503,)
    )
    yield RouteDoc(
        "get",
        "/get_model_info",
        "model info of the first routable worker",
        {200: "Anything"},
        (502, 503),
    )
    for path in ("/server_info", "/get_server_info"):
        yield RouteDoc("get", path, _SERVER[1], {200: "Fields"}, _SERVER[0])
    for path in ("/get_loads", "/v1/loads"):
        yield RouteDoc("get", path, "the load of each worker", {200: "Loads"})
    yield RouteDoc("get", "/engine_metrics", "the workers' metrics as one text", {200: PLAIN})


def _weights() -> Iterator[RouteDoc]:
    for route in ROUTES:
        for method in route.methods:
            yield _admin(route, method)
    yield RouteDoc("get", "/weights", "the weights of the fleet", {200: "Weights"})
    yield RouteDoc("get", "/weights/versions", "the stored versions", {200: "Versions"})
    answers = dict.fromkeys((200, 400, 404, 502, 503), "Outcome")
    summary = "deliver a stored version to all workers"
    yield RouteDoc("post", ROLLBACK.path, summary, answers, (), "Fields")
    yield from _rollouts()
    summary = "end a trainer's group and the operation that runs in it"
    yield RouteDoc("post", ABORT_SYNC, summary, dict.fromkeys((200, 409), "Outcome"))
    for path in RESOLVES:
        answers = dict.fromkeys((200, 400, 422, 502, 503), "Outcome")
        yield RouteDoc(
            "post",
            path,
            "confirm that uncertain workers have been verified",
            answers,
            (),
            "Acknowledgement",
        )


def _rollouts() -> Iterator[RouteDoc]:
    follow = Parameter(
        "follow", FLAG, "send events until it has ended; Accept does so, too: " + EVENTS
    )
    answers = dict.fromkeys((400, 404, 409, 422, 503), "Outcome")
    yield RouteDoc(
        "post", ROLLOUT.path, "new weights, a few workers at a time",
        {200: f"{EVENTS} RolloutEvents", 202: "RolloutOutcome", **answers}, (),
        "RolloutOrder", (SELECTOR, follow),
    )  # fmt: skip
    responses = {200: f"{EVENTS} Rollout"}
    yield RouteDoc(
        "get", ROLLOUT.path, "the progress of the rollout", responses, (503,), query=(follow,)
    )
    for path in STEER_ROLLOUT:
        summary = f"{path.rpartition('/')[2]} the running rollout"
        steered = {200: "RolloutOutcome", 409: "Outcome"}
        yield RouteDoc("post", path, summary, steered)


def _aborts() -> Iterator[RouteDoc]:
    answers: dict[int, str] = dict.fromkeys((200, 400, 502, 503), "Outcome")
    for path in ABORTS:
        summary = "abort requests on their workers and in the admission queue"
        yield RouteDoc("post", path, summary, answers, (), "Fields")


def _admin(route: AdminRoute, method: str) -> RouteDoc:
    answers: dict[int, str] = {200: "Outcome", **OPERATION}
    if route.path == FROM_TENSOR:
        answers = {501: "Outcome"}
    elif route.path == "/flush_cache":
        answers = {200: "Flushed", 400: "Outcome", 404: "Outcome", 502: "Flushed"}
    elif route.path == "/get_weights_by_name":
        answers = {**answers, 200: "Anything", 409: "Outcome"}
    elif route.path in (MODEL_INFO, WEIGHT_INFO, WEIGHT_CHECKER, *TRANSFER):
        answers[409] = "Outcome"
    if route.path in (INIT, TRANSFER_INIT):
        answers[422] = "Outcome"
    takes = "Fields" if method == "POST" and route.path not in ("/flush_cache", FROM_TENSOR) else ""
    takes = "Received" if route.path == FROM_DISTRIBUTED else takes
    return RouteDoc(
        method.lower(), route.path, f"{route.name.replace('_', ' ')} on all workers", answers, (),
        takes, () if route.path == FROM_TENSOR else (SELECTOR,),
    )  # fmt: skip


def _rl() -> Iterator[RouteDoc]:
    yield RouteDoc("get", "/v1/rl/workers", "all workers, in smg's form", {200: "RlWorkers"})
    yield RouteDoc("get", RL_WORKER, "one worker, in smg's form", {200: "RlWorker"}, (404,))
    selector = SELECTOR._replace(required=True)
    for method in ("get", "post", "put", "patch", "delete"):
        takes = "Anything" if method != "get" else ""
        answers = {200: "RlResults", 207: "RlResults"}
        path, path_of_one = ENGINE_PATHS
        summary = "any path of the engines, on the selected workers"
        yield RouteDoc(method, path, summary, answers, RL_ERRORS, takes, (selector,))
        summary = "any path of one worker's engine; the status of a failure is the worker's"
        yield RouteDoc(method, path_of_one, summary, {200: "RlResult"}, RL_ERRORS, takes)


TABLE: Final[tuple[RouteDoc, ...]] = (
    *_fleet(),
    *_program(),
    *_others(),
    *_weights(),
    *_aborts(),
    *_rl(),
)

JSON = "application/json"
ABOUT = (
    "The control routes of omni-proxy. Model routes are relayed to workers unchanged and are not "
    "described here. Any route may also answer 405 and 413, 500 for an internal error, 503 while "
    "the admin API restarts, and 400, 408, 414, 417, 431, 501 or 505 for a malformed request, "
    "always in the shape of `Error`."
)
KEY = (
    "`[admin] api_key` of the configuration, which may do everything, or a key of [[admin.keys]], "
    "whose role must be one of those listed; without any admin key `[server] api_key`. Without "
    "any key every route is open. For the engines' own paths below `engine/` the path determines "
    "the role."
)
PLACES = {
    "model": "the id of a model",
    "reservation_id": "the id from the reservation's response, encoded",
    "caller": "the name of a caller, encoded as one segment",
    "worker_id": "the worker's URL, encoded as one segment, or its id",
    "path": "a path of the engine, of one or more segments",
}


class OpenApiRoutes:
    def mount(self, app: Quart) -> None:
        app.add_url_rule("/openapi.json", "openapi", self.show)

    async def show(self) -> Response:
        return Response(_written(), content_type=JSON)


@cache
def _written() -> bytes:
    return to_json(description())


def description() -> dict[str, object]:
    """The document, encodable as JSON."""
    paths: dict[str, dict[str, object]] = {}
    for route in TABLE:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "omni-proxy", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": KEY}},
        },
    }


def _operation(route: RouteDoc) -> dict[str, object]:
    closed = needs_key(route.method.upper(), route.path, AdminConfig())
    answers = {status: _answer(content) for status, content in route.answers.items()}
    refusal = "Outcome" if route.path in TOPPED else "Error"
    for status in (*route.errors, *((401, 403) if closed else ())):
        answers[status] = _answer(refusal)
    operation: dict[str, object] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method}{route.path}").strip("_"),
        "summary": route.summary,
        "responses": {str(status): answers[status] for status in sorted(answers)},
    }
    if parameters := [*_in_path(route.path), *map(_in_query, route.query)]:
        operation["parameters"] = parameters
    if route.takes:
        operation["requestBody"] = {"content": {JSON: {"schema": ref(route.takes)}}}
    if closed:
        roles = () if route.path in ENGINE_PATHS else roles_for(route.method.upper(), route.path)
        operation["security"] = [{"key": list(roles)}]
    return operation


def _answer(content: str) -> Schema:
    """The description of a response; `content`: media types and names of schemas."""
    media: dict[str, object] = {}
    for name in content.split():
        if "/" in name:
            media[name] = {"schema": ANY if name == EVENTS else TEXT}
        else:
            media[JSON] = {"schema": ref(name)}
    text = {"Error": "refused", "Outcome": "the outcome"}.get(content, content or "nothing new")
    return {"description": text, "content": media} if media else {"description": text}


def _in_path(path: str) -> list[dict[str, object]]:
    return [
        {
            "name": name, "in": "path", "required": True, "description": PLACES[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in re.findall(r"{(\w+)}", path)
    ]  # fmt: skip


def _in_query(parameter: Parameter) -> dict[str, object]:
    return {
        "name": parameter.name,
        "in": "query",
        "description": parameter.says,
        "required": parameter.required,
        "schema": parameter.schema,
    }
