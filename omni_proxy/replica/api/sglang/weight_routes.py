"""Operations on weights: updates, trainer groups, versions, checks (note:api-server 2.2, 3, 9.1).

Invariant: tensors are read from disk or a group; from a body only if `enable_tensor_updates` is
set, and then as safetensors, never as a pickle. Responses are those of `admin_operations`, except
where trainers expect SGLang's: an array for a tensor, and its message for unsupported operations.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from msgspec import Meta
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, error_message, json_response
from omni_proxy.replica.api.common.lenient_decode import MISSING, validate
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang.admin_operations import ROUTES as OPERATION_ROUTES
from omni_proxy.replica.api.sglang.admin_operations import (
    OperationBody,
    OperationRoute,
    add_admin_envelope,
    admin_body,
    operation_view,
    require_key,
    run_operation,
    with_status,
)

S = TypeVar("S", bound=OperationBody)

NO_TENSOR_UPDATES = {
    "error": {
        "message": "update_weights_from_tensor is not yet implemented. Use "
        "update_weights_from_disk for the disk-based weight update path.",
        "code": "not_implemented",
    }
}
WEIGHTS_BY_NAME_SECS = 60.0
# Upper bounds for operations whose deadline is enforced by the stage.
MAX_WAIT_SECS = 3600.0
GRACE_SECS = 30.0


class FromDisk(OperationBody, kw_only=True):
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


class ReadAhead(OperationBody, kw_only=True):
    """A weight file that is still being written, and how many of its first bytes are final."""

    model_path: str
    nbytes: int


class FromTensor(OperationBody, kw_only=True):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool | None = True
    abort_all_requests: bool | None = False
    weight_version: str | None = None
    torch_empty_cache: bool | None = False


class StageDeadlineBody(OperationBody, kw_only=True):
    """An operation whose deadlines are enforced by the stage, which replies when one has passed.

    `timeout_s` replaces them, except for the deadline to arm, which it can only shorten. The route
    waits longer than the stage. An invalid time is refused by the stage.
    """

    def payload(self) -> dict[str, Any]:
        deadline = {} if self.timeout_s is None else {"deadline_secs": self.timeout_s}
        return super().payload() | deadline

    def limit_secs(self, default_secs: float) -> float:
        return max(super().limit_secs(default_secs), 0.0) + GRACE_SECS


class InitGroup(StageDeadlineBody, kw_only=True):
    """Without a `backend`, the stage chooses the one for its device."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int | None = 0
    group_name: str | None = "weight_update_group"
    backend: str | None = None


class DestroyGroup(OperationBody, kw_only=True):
    group_name: str | None = "weight_update_group"


class PrepareUpdate(StageDeadlineBody, kw_only=True):
    """Either `buckets`, or one bucket's fields at the top level; errors in them are a 400."""

    names: Any = None
    dtypes: Any = None
    shapes: Any = None
    buckets: Any = None
    num_buckets: Any = None
    group_name: str | None = "weight_update_group"
    transport: Any = None
    load_format: Any = None


class CompleteUpdate(StageDeadlineBody, kw_only=True):
    """`flush_cache` is false by default, as in the older of the two formats."""

    group_name: str | None = "weight_update_group"
    flush_cache: bool | None = False
    weight_version: str | None = None
    torch_empty_cache: bool | None = False


class FromDistributed(StageDeadlineBody, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str | None = "weight_update_group"
    flush_cache: bool | None = True
    abort_all_requests: bool | None = False
    weight_version: str | None = None
    load_format: str | None = None
    torch_empty_cache: bool | None = False


class BeginUpdate(OperationBody, kw_only=True):
    selector: str | None = "all"


class SetVersion(OperationBody, kw_only=True):
    new_version: str
    abort_all_requests: bool | None = True


class CheckWeights(OperationBody, kw_only=True):
    action: str | None = "checksum"


class WeightsByName(OperationBody, kw_only=True):
    name: str
    truncate_size: Annotated[int, Meta(ge=0)] | None = 100


def with_ready_status(aggregate: dict[str, Any]) -> dict[str, Any]:
    """Add the keys `status` and `success`, which the clients of the two formats read."""
    return with_status(aggregate) | {
        "status": "ready",
        "message": _weight_stage_result(aggregate)["message"],
    }


def with_completed_counts(aggregate: dict[str, Any]) -> dict[str, Any]:
    done = _weight_stage_result(aggregate)
    keys = (
        "num_buckets_received", "weight_version", "weights", "buckets_applied", "cache_epoch",
    )  # fmt: skip
    counts = {key: done["data"][key] for key in keys}
    return with_status(aggregate) | {"message": done["message"]} | counts


def _weight_stage_result(aggregate: dict[str, Any]) -> dict[str, Any]:
    """The result of the stage that has the weights; a successful operation has exactly one."""
    results: list[dict[str, Any]] = aggregate["results"]
    return next(result for result in results if not result["data"].get("skipped"))


ROUTES = (
    OperationRoute("/update_weights_from_disk", FromDisk, 120.0),
    OperationRoute("/read_weights_ahead", ReadAhead, 120.0),
    OperationRoute("/init_weights_update_group", InitGroup, MAX_WAIT_SECS),
    OperationRoute("/destroy_weights_update_group", DestroyGroup, 300.0),
    OperationRoute("/update_weights_from_distributed", FromDistributed, MAX_WAIT_SECS),
    OperationRoute("/prepare_weights_update", PrepareUpdate, MAX_WAIT_SECS, top=with_ready_status),
    OperationRoute(
        "/complete_weights_update", CompleteUpdate, MAX_WAIT_SECS, top=with_completed_counts
    ),
    OperationRoute("/begin_weight_update", BeginUpdate, 60.0, body_needed=False),
    OperationRoute("/end_weight_update", OperationBody, 120.0, body_needed=False),
    OperationRoute("/weights_checker", CheckWeights, 120.0),
)
FROM_TENSOR = OperationRoute("/update_weights_from_tensor", FromTensor, 120.0)
SET_VERSION = OperationRoute("/update_weight_version", SetVersion, 60.0)
CHECK = OperationRoute("/weights_checker", CheckWeights, 120.0)
WEIGHTS_BY_NAME = OperationRoute("/get_weights_by_name", WeightsByName, WEIGHTS_BY_NAME_SECS)


class WeightUpdateRoutes:
    """Routes whose request or response differs from that of the other operations."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def check(self) -> Response:
        """GET /weights_checker, with the action in the query."""
        require_key(self._context)
        return json_response(await run_operation(self._context, CHECK, _read_query(CheckWeights)))

    async def from_tensor(self) -> Response:
        if not self._context.enable_tensor_updates:
            require_key(self._context)
            return json_response(NO_TENSOR_UPDATES, 501)
        body = validate(FromTensor, await admin_body(self._context))
        return json_response(with_status(await run_operation(self._context, FROM_TENSOR, body)))

    async def set_version(self) -> Response:
        body = validate(SetVersion, await admin_body(self._context))
        aggregate = await run_operation(self._context, SET_VERSION, body)
        return json_response(with_status(aggregate) | {"new_version": body.new_version})

    async def weights_by_name(self) -> Response:
        """The first rows of a tensor as nested lists, from the first stage that has it."""
        payload = await admin_body(self._context)
        body = (
            _read_query(WeightsByName)
            if payload is MISSING and request.args
            else validate(WeightsByName, payload)
        )
        try:
            aggregate = await run_operation(self._context, WEIGHTS_BY_NAME, body)
        except DetailError as error:
            return _tensor_not_found(error_message(error.detail))
        for result in aggregate["results"]:
            if "parameter" in result["data"]:
                return json_response(result["data"]["parameter"])
        return _tensor_not_found("no stage of this pipeline has weights")


def _read_query(kind: type[S]) -> S:
    return validate(kind, request.args.to_dict())


def _tensor_not_found(message: str) -> Response:
    return json_response({"error": {"message": message}}, 400)


def mount(app: QuartTrio, context: RouteContext) -> None:
    for route in ROUTES:
        view = operation_view(context, route)
        app.add_url_rule(route.path, route.action, view, methods=["POST"])
    routes = WeightUpdateRoutes(context)
    app.add_url_rule(CHECK.path, "weights_checker_of_query", routes.check)
    app.add_url_rule(FROM_TENSOR.path, FROM_TENSOR.action, routes.from_tensor, methods=["POST"])
    app.add_url_rule(SET_VERSION.path, SET_VERSION.action, routes.set_version, methods=["POST"])
    app.add_url_rule(
        WEIGHTS_BY_NAME.path,
        WEIGHTS_BY_NAME.action,
        routes.weights_by_name,
        methods=["GET", "POST"],
    )
    operations = (*OPERATION_ROUTES, *ROUTES, FROM_TENSOR, SET_VERSION)
    add_admin_envelope(app, frozenset(route.path for route in operations))
