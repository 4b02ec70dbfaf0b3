"""Operations on weights over HTTP: updates, groups, versions, checks (api-server.md 2.2, 3, 9.1).

Invariant: tensors come from a disk or a group, never in a body, unless `enable_tensor_updates`
says so; then as safetensors, never as a pickle. Answers are those of `admin.py`, save where
trainers expect sglang's: an array for a tensor, and its own words for what is not offered.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from msgspec import Meta
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.admin import (
    AdminRoute,
    Operation,
    message_of,
    operate,
    topped,
    view_of,
)
from omni_proxy.replica.api.auth import admin_body, require_key
from omni_proxy.replica.api.errors import Refused, reply
from omni_proxy.replica.api.fields import MISSING, read
from omni_proxy.replica.api.served import Served

S = TypeVar("S", bound=Operation)

NO_TENSOR_UPDATES = {
    "error": {
        "message": "update_weights_from_tensor is not yet implemented. Use "
        "update_weights_from_disk for the disk-based weight update path.",
        "code": "not_implemented",
    }
}
LOOK_SECS = 60.0
# Where no deadline is the stage's own, it has a shorter one.
MOST_SECS = 3600.0
GRACE_SECS = 30.0


class FromDisk(Operation, kw_only=True):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool | None = False
    weight_version: str | None = None
    is_async: bool | None = False
    torch_empty_cache: bool | None = False
    keep_pause: bool | None = False
    recapture_cuda_graph: bool | None = False
    token_step: int | None = 0
    flush_cache: bool | None = True
    manifest: dict[str, Any] | None = None


class ReadAhead(Operation, kw_only=True):
    """A file that is being written, and how many of its first bytes are final."""

    model_path: str
    nbytes: int


class FromTensor(Operation, kw_only=True):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool | None = True
    abort_all_requests: bool | None = False
    weight_version: str | None = None
    torch_empty_cache: bool | None = False


class Bounded(Operation, kw_only=True):
    """An operation whose deadlines are the stage's: each of them ends in an answer, disarmed.

    `timeout_s` takes their place, but for that of arming, which it can only shorten; nobody in
    between gives up before them. One that is no time at all is for the stage to refuse.
    """

    def payload(self) -> dict[str, Any]:
        own = {} if self.timeout_s is None else {"deadline_secs": self.timeout_s}
        return super().payload() | own

    def limit_secs(self, default_secs: float) -> float:
        return max(super().limit_secs(default_secs), 0.0) + GRACE_SECS


class InitGroup(Bounded, kw_only=True):
    """Without a `backend` the stage takes what fits its device."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int | None = 0
    group_name: str | None = "weight_update_group"
    backend: str | None = None


class DestroyGroup(Operation, kw_only=True):
    group_name: str | None = "weight_update_group"


class PrepareUpdate(Bounded, kw_only=True):
    """Buckets, or one bucket's names at the top; what is wrong with them is told as a 400."""

    names: Any = None
    dtypes: Any = None
    shapes: Any = None
    buckets: Any = None
    num_buckets: Any = None
    group_name: str | None = "weight_update_group"
    transport: Any = None
    load_format: Any = None


class CompleteUpdate(Bounded, kw_only=True):
    """No flush unless it is asked for, as the older of the two dialects has it."""

    group_name: str | None = "weight_update_group"
    flush_cache: bool | None = False
    weight_version: str | None = None
    torch_empty_cache: bool | None = False


class FromDistributed(Bounded, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str | None = "weight_update_group"
    flush_cache: bool | None = True
    abort_all_requests: bool | None = False
    weight_version: str | None = None
    load_format: str | None = None
    torch_empty_cache: bool | None = False


class BeginUpdate(Operation, kw_only=True):
    selector: str | None = "all"


class NameVersion(Operation, kw_only=True):
    new_version: str
    abort_all_requests: bool | None = True


class Check(Operation, kw_only=True):
    action: str | None = "checksum"


class Look(Operation, kw_only=True):
    name: str
    truncate_size: Annotated[int, Meta(ge=0)] | None = 100


def ready(aggregate: dict[str, Any]) -> dict[str, Any]:
    """In the words of both dialects: `status` and `success`."""
    return topped(aggregate) | {"status": "ready", "message": _done(aggregate)["message"]}


def completed(aggregate: dict[str, Any]) -> dict[str, Any]:
    done = _done(aggregate)
    keys = (
        "num_buckets_received", "weight_version", "weights", "buckets_applied", "cache_epoch",
    )  # fmt: skip
    told = {key: done["data"][key] for key in keys}
    return topped(aggregate) | {"message": done["message"]} | told


def _done(aggregate: dict[str, Any]) -> dict[str, Any]:
    """The answer of the stage whose weights they were: there is one, where it succeeded."""
    results: list[dict[str, Any]] = aggregate["results"]
    return next(each for each in results if not each["data"].get("skipped"))


ROUTES = (
    AdminRoute("/update_weights_from_disk", FromDisk, 120.0),
    AdminRoute("/read_weights_ahead", ReadAhead, 120.0),
    AdminRoute("/init_weights_update_group", InitGroup, MOST_SECS),
    AdminRoute("/destroy_weights_update_group", DestroyGroup, 300.0),
    AdminRoute("/update_weights_from_distributed", FromDistributed, MOST_SECS),
    AdminRoute("/prepare_weights_update", PrepareUpdate, MOST_SECS, top=ready),
    AdminRoute("/complete_weights_update", CompleteUpdate, MOST_SECS, top=completed),
    AdminRoute("/begin_weight_update", BeginUpdate, 60.0, body_needed=False),
    AdminRoute("/end_weight_update", Operation, 120.0, body_needed=False),
    AdminRoute("/weights_checker", Check, 120.0),
)
FROM_TENSOR = AdminRoute("/update_weights_from_tensor", FromTensor, 120.0)
NAME_VERSION = AdminRoute("/update_weight_version", NameVersion, 60.0)
CHECK = AdminRoute("/weights_checker", Check, 120.0)
LOOK = AdminRoute("/get_weights_by_name", Look, LOOK_SECS)


class WeightRoutes:
    """The routes whose answer or whose body is not that of every operation."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def check(self) -> Response:
        """GET, with the action in the query."""
        require_key(self._served)
        return reply(await operate(self._served, CHECK, _queried(Check)))

    async def from_tensor(self) -> Response:
        if not self._served.enable_tensor_updates:
            require_key(self._served)
            return reply(NO_TENSOR_UPDATES, 501)
        body = read(FromTensor, await admin_body(self._served))
        return reply(topped(await operate(self._served, FROM_TENSOR, body)))

    async def name_version(self) -> Response:
        body = read(NameVersion, await admin_body(self._served))
        aggregate = await operate(self._served, NAME_VERSION, body)
        return reply(topped(aggregate) | {"new_version": body.new_version})

    async def look(self) -> Response:
        """The first rows of a tensor, as nested lists; of the first stage that has one so named."""
        given = await admin_body(self._served)
        body = _queried(Look) if given is MISSING and request.args else read(Look, given)
        try:
            aggregate = await operate(self._served, LOOK, body)
        except Refused as refused:
            return _unseen(message_of(refused.detail))
        for result in aggregate["results"]:
            if "parameter" in result["data"]:
                return reply(result["data"]["parameter"])
        return _unseen("no stage of this pipeline has weights")


def _queried(kind: type[S]) -> S:
    return read(kind, request.args.to_dict())


def _unseen(message: str) -> Response:
    return reply({"error": {"message": message}}, 400)


def mount(app: QuartTrio, served: Served) -> None:
    for route in ROUTES:
        view = view_of(served, route)
        app.add_url_rule(route.path, route.action, view, methods=["POST"])
    own = WeightRoutes(served)
    app.add_url_rule(CHECK.path, "weights_checker_of_query", own.check)
    app.add_url_rule(FROM_TENSOR.path, FROM_TENSOR.action, own.from_tensor, methods=["POST"])
    app.add_url_rule(NAME_VERSION.path, NAME_VERSION.action, own.name_version, methods=["POST"])
    app.add_url_rule(LOOK.path, LOOK.action, own.look, methods=["GET", "POST"])
