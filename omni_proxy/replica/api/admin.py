"""Operations on the stages over HTTP: one table of routes, and /model_info (api-server.md 2).

Invariant: what a body leaves out is sent with its default, null not at all, `stages` and
`timeout_s` never. A failed operation is a 400 whose `detail` is the whole aggregate. A timeout or
an unknown stage is told as such, not as a bare 500.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.auth import admin_body, require_key
from omni_proxy.replica.api.errors import Refused, reply
from omni_proxy.replica.api.fields import MISSING, read
from omni_proxy.replica.api.served import Served

MODEL_INFO_SECS = 30.0
SHARED_FACTS = ("weight_version", "model_path", "load_format")
# What a trainer plans by; of the first stage that has weights.
MODEL_FACTS = ("weight_sync", "dtype", "kv_cache_dtype", "cache_epoch", "disable_radix_cache")
COUNT = "num_paused_requests"
REFUSED = 400

View = Callable[[], Awaitable[Response]]


class Operation(Struct, kw_only=True):
    """What every operation's body may say; its subclasses' fields are the payload."""

    stages: list[str] | None = None
    timeout_s: float | None = None

    def payload(self) -> dict[str, Any]:
        said = msgspec.structs.asdict(self)
        common = Operation.__struct_fields__
        return {key: said[key] for key in said if key not in common and said[key] is not None}

    def limit_secs(self, default_secs: float) -> float:
        """How long the stages' answers are waited for."""
        return default_secs if self.timeout_s is None else self.timeout_s


class Pause(Operation, kw_only=True):
    mode: str | None = "abort"


class Continue(Operation, kw_only=True):
    torch_empty_cache: bool | None = True


def topped(aggregate: dict[str, Any]) -> dict[str, Any]:
    """An aggregate that succeeded, with what sglang's clients look for beside it."""
    counts = [each["data"][COUNT] for each in aggregate["results"] if COUNT in each["data"]]
    return aggregate | {"status": "ok"} | ({COUNT: sum(counts)} if counts else {})


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """POST `path`: the stages' action of that name, with a time limit where the body sets none.

    Where no body is needed, none is as good as an empty one. `top` is told of a success.
    """

    path: str
    body: type[Operation]
    timeout_secs: float
    body_needed: bool = True
    top: Callable[[dict[str, Any]], dict[str, Any]] = topped

    @property
    def action(self) -> str:
        return self.path.removeprefix("/")


ROUTES = (
    AdminRoute("/pause_generation", Pause, 60.0),
    AdminRoute("/continue_generation", Continue, 60.0),
)


def view_of(served: Served, route: AdminRoute) -> View:
    async def view() -> Response:
        given = await admin_body(served)
        body = read(route.body, {} if given is MISSING and not route.body_needed else given)
        return reply(route.top(await operate(served, route, body)))

    return view


def message_of(detail: Any) -> str:
    """What a refusal's `detail` says: words, an aggregate, or a list of problems."""
    if isinstance(detail, dict):
        return str(detail["message"])
    if isinstance(detail, list):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in detail)
    return str(detail)


async def operate(served: Served, route: AdminRoute, body: Operation) -> dict[str, Any]:
    """The aggregate of an operation that succeeded; raises Refused with that of any other.

    400, or what a stage's `data` says (409: another trainer is in the way).
    """
    limit_secs = body.limit_secs(route.timeout_secs)
    aggregate = await served.client.admin(route.action, body.payload(), body.stages, limit_secs)
    if not aggregate["success"]:
        told = [each["data"].get("status_code", REFUSED) for each in aggregate["results"]]
        raise Refused(max(told, default=REFUSED), aggregate)
    return aggregate


class ModelInfoRoutes:
    def __init__(self, served: Served) -> None:
        self._served = served

    async def get(self) -> Response:
        require_key(self._served)
        return await self._answer(Operation())

    async def post(self) -> Response:
        return await self._answer(read(Operation, await admin_body(self._served)))

    async def _answer(self, asked: Operation) -> Response:
        limit_secs = MODEL_INFO_SECS if asked.timeout_s is None else asked.timeout_s
        aggregate = await self._served.client.admin("model_info", {}, asked.stages, limit_secs)
        if not aggregate["success"]:
            raise Refused(400, aggregate)
        facts = facts_of(aggregate)
        if len(facts.versions) > 1:
            raise Refused(409, _mixed(aggregate, facts.versions))
        return reply(aggregate | facts.shared | {"stages": aggregate["results"]})


@dataclass(frozen=True, slots=True)
class Facts:
    """`shared`: what all stages that have weights agree on, else None; `versions` of all.

    MODEL_FACTS are the first stage's: one pipeline has one model that trainers reach.
    """

    shared: dict[str, Any]
    versions: list[str]
    stages: list[dict[str, Any]]


def facts_of(aggregate: dict[str, Any]) -> Facts:
    told = [each for each in aggregate["results"] if not each["data"].get("skipped")]
    shared = {}
    for name in SHARED_FACTS:
        values = [each["data"].get(name) for each in told]
        shared[name] = values[0] if values and all(each == values[0] for each in values) else None
    trained = (each["data"] for each in told if each["data"].get(MODEL_FACTS[0]))
    model: dict[str, Any] = next(trained, {})
    shared |= {name: model.get(name) for name in MODEL_FACTS}
    versions = {each["data"].get("weight_version") for each in told} - {None}
    return Facts(shared, sorted(map(str, versions)), told)


def _mixed(aggregate: dict[str, Any], versions: list[str]) -> dict[str, Any]:
    stages = [
        each["data"] | {"stage": each["stage"], "success": each["success"]}
        for each in facts_of(aggregate).stages
    ]
    return {
        "success": False,
        "message": "mixed stage weight_version",
        "mixed_state": {"weight_version": versions},
        "stages": stages,
        "admin": aggregate,
    }


def mount(app: QuartTrio, served: Served) -> None:
    for route in ROUTES:
        view = view_of(served, route)
        app.add_url_rule(route.path, route.action, view, methods=["POST"])
    info = ModelInfoRoutes(served)
    app.add_url_rule("/model_info", "model_info", info.get)
    app.add_url_rule("/model_info", "model_info_of", info.post, methods=["POST"])
