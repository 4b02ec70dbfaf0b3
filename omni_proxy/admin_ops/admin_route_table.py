"""The admin routes as a table: the effect of each on its workers, and its requirements. Pure.

kind      lock and journal   cordon reason       afterwards
read      no                 -                   -
plain     no                 -                   -
flush     no                 -                   prefix caches are cleared
continue  no                 -                   "paused" ends on success
pause     yes                paused              stays paused, see `while_paused`
group     yes                updating            a failed init disables its worker
update    yes                updating            failed workers are uncertain, see operation.py
Invariant: a route of [[control_routes]] never replaces a built-in one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from omni_proxy.admin_ops.engine_dialects import (
    ABORT_REQUEST,
    ABORT_REQUESTS,
    BEGIN,
    COMPLETE,
    CONTINUE_GENERATION,
    DESTROY,
    END,
    FINISH_UPDATE,
    FLUSH_CACHE,
    FROM_DISK,
    FROM_DISTRIBUTED,
    FROM_TENSOR,
    INIT,
    IS_PAUSED,
    IS_SLEEPING,
    LOAD_ADAPTER,
    MODEL_INFO,
    PAUSE,
    PAUSE_GENERATION,
    PREPARE,
    RESET_PREFIX_CACHE,
    RESUME,
    RPC_ALL,
    SLEEP,
    START_DRAFT_UPDATE,
    START_UPDATE,
    TRANSFER_INIT,
    TRANSFER_SHUTDOWN,
    UNLOAD_ADAPTER,
    UPDATE_VERSION,
    UPDATE_WEIGHTS,
    V1_LOAD_ADAPTER,
    V1_UNLOAD_ADAPTER,
    WAKE_UP,
    WEIGHT_CHECKER,
    WEIGHT_INFO,
    WEIGHTS_BY_NAME,
    WEIGHTS_CHECKER,
    WORLD_SIZE,
    EngineCall,
)
from omni_proxy.config.problem import ConfigError, Problem
from omni_proxy.config.schema import Config
from omni_proxy.fleet.cordon_reasons import PAUSED, UPDATING
from omni_proxy.routing.routes import MethodNotAllowed, match_route


class Kind(StrEnum):
    """The effect of a route on a worker."""

    READ = "read"
    PLAIN = "plain"  # does not affect routing or weights
    FLUSH = "flush"
    CONTINUE = "continue"
    PAUSE = "pause"
    GROUP = "group"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """`whole`: success replaces all weights. `receives`: a refusal does not prove them unchanged.

    `labels`: changes only a label, no weights. `discards`: after success there are no weights to
    serve with. `one_engine`: the response has the form of one vLLM engine's (`results.as_one`).
    """

    path: str
    kind: Kind
    methods: tuple[str, ...] = ("POST",)
    whole: bool = False
    receives: bool = False
    labels: bool = False
    discards: bool = False
    one_engine: bool = False

    @property
    def needs_lock(self) -> bool:
        """Runs one at a time over the fleet, and is recorded before its first call is sent."""
        return self.kind in (Kind.PAUSE, Kind.GROUP, Kind.UPDATE)

    @property
    def hold(self) -> str:
        """The cordon reason of its targets while it runs; "" if they stay in rotation."""
        if not self.needs_lock:
            return ""
        return PAUSED if self.kind is Kind.PAUSE else UPDATING

    @property
    def drains(self) -> bool:
        """Whether requests in flight may get time to end first."""
        return self.kind in (Kind.PAUSE, Kind.UPDATE)

    @property
    def name(self) -> str:
        return self.path.removeprefix("/")


TRANSFER: Final = (TRANSFER_INIT, START_UPDATE, START_DRAFT_UPDATE, UPDATE_WEIGHTS, FINISH_UPDATE,
                   TRANSFER_SHUTDOWN)  # fmt: skip
READ_METHODS: Final = ("GET", "POST")

# SGLang's dialect, then vLLM's: a fleet accepts both (`engine_dialects.py`).
ROUTES: Final = (
    AdminRoute(MODEL_INFO, Kind.READ, READ_METHODS),
    AdminRoute(WEIGHTS_CHECKER, Kind.READ, READ_METHODS),
    AdminRoute(WEIGHTS_BY_NAME, Kind.READ, READ_METHODS),
    AdminRoute(FLUSH_CACHE, Kind.FLUSH, READ_METHODS),
    AdminRoute("/start_profile", Kind.PLAIN),
    AdminRoute("/stop_profile", Kind.PLAIN),
    AdminRoute(CONTINUE_GENERATION, Kind.CONTINUE),
    AdminRoute(PAUSE_GENERATION, Kind.PAUSE),
    AdminRoute(INIT, Kind.GROUP),
    AdminRoute(PREPARE, Kind.GROUP),
    AdminRoute(COMPLETE, Kind.UPDATE, receives=True),
    AdminRoute(DESTROY, Kind.GROUP),
    AdminRoute(BEGIN, Kind.GROUP),
    AdminRoute(END, Kind.UPDATE, receives=True),
    AdminRoute(FROM_DISK, Kind.UPDATE, whole=True),
    AdminRoute(FROM_DISTRIBUTED, Kind.UPDATE, receives=True),
    AdminRoute(FROM_TENSOR, Kind.UPDATE, receives=True),
    AdminRoute(UPDATE_VERSION, Kind.UPDATE, labels=True),
    *(
        replace(route, one_engine=True)
        for route in (
            AdminRoute(PAUSE, Kind.PAUSE),
            AdminRoute(RESUME, Kind.CONTINUE),
            AdminRoute(IS_PAUSED, Kind.READ, ("GET",)),
            AdminRoute(SLEEP, Kind.PAUSE),
            AdminRoute(WAKE_UP, Kind.CONTINUE),
            AdminRoute(IS_SLEEPING, Kind.READ, ("GET",)),
            AdminRoute(WORLD_SIZE, Kind.READ, ("GET",)),
            AdminRoute(TRANSFER_INIT, Kind.GROUP),
            AdminRoute(START_UPDATE, Kind.GROUP),
            AdminRoute(START_DRAFT_UPDATE, Kind.GROUP),
            AdminRoute(UPDATE_WEIGHTS, Kind.UPDATE, receives=True),
            AdminRoute(FINISH_UPDATE, Kind.UPDATE, receives=True),
            AdminRoute(TRANSFER_SHUTDOWN, Kind.GROUP),
            AdminRoute(WEIGHT_INFO, Kind.READ, ("GET",)),
            AdminRoute(WEIGHT_CHECKER, Kind.READ),
            AdminRoute(RESET_PREFIX_CACHE, Kind.FLUSH),
            AdminRoute(RPC_ALL, Kind.GROUP),
            AdminRoute(LOAD_ADAPTER, Kind.GROUP),
            AdminRoute(UNLOAD_ADAPTER, Kind.GROUP),
            AdminRoute(V1_LOAD_ADAPTER, Kind.GROUP),
            AdminRoute(V1_UNLOAD_ADAPTER, Kind.GROUP),
        )
    ),
)
BY_PATH: Final = {route.path: route for route in ROUTES}
RESOLVES: Final = ("/weights/resolve", "/weight_update_journal/resolve")
ROLLBACK: Final = AdminRoute("/weights/rollback", Kind.UPDATE, whole=True)
ROLLOUT: Final = AdminRoute("/weights/rollout", Kind.UPDATE, whole=True)
STEER_ROLLOUT: Final = tuple(f"{ROLLOUT.path}/{step}" for step in ("pause", "resume", "cancel"))
ABORT_SYNC: Final = "/weights/sync/abort"
ABORTS: Final = (ABORT_REQUEST, ABORT_REQUESTS)  # SGLang's and vLLM's: `abort_requests.py`
# Refusals of these have `success`, `message` and `status` at the top level, too.
TOPPED: Final = frozenset(
    (*BY_PATH, *RESOLVES, ROLLBACK.path, ROLLOUT.path, *STEER_ROLLOUT, ABORT_SYNC, *ABORTS)
)
CONTINUE: Final = BY_PATH[CONTINUE_GENERATION]
# All other routes of the admin API: paths, and prefixes (`_BELOW`).
_PATHS: Final = frozenset(
    (
        "/live", "/ready", "/health", "/liveness", "/readiness", "/health_generate", "/status",
        "/workers", "/list_workers", "/add_worker", "/remove_worker", "/config", "/reload",
        "/server_info", "/get_server_info", "/get_model_info", "/get_loads", "/v1/loads",
        "/v1/models", "/metrics", "/engine_metrics", "/explain", "/feed", "/keys", "/dashboard",
        "/history", "/finish_session", "/openapi.json", "/weights", "/weights/versions",
        "/v1/rl/workers", "/select", "/select_and_reserve",
    )
)  # fmt: skip
_BELOW: Final = (
    "/workers/", "/keys/", "/v1/models/", "/v1/rl/workers/", "/v1/rl/engine/", "/reservations/",
)  # fmt: skip


def paths() -> frozenset[str]:
    """The fixed paths of the admin API."""
    return TOPPED | _PATHS


def is_built_in(path: str) -> bool:
    """Whether the admin API has a built-in route for the (decoded) path, with any method."""
    path = "/" + path.lstrip("/")  # as in Quart
    return path in TOPPED or path in _PATHS or path.startswith(_BELOW)


def variant_of(route: AdminRoute, call: EngineCall) -> AdminRoute:
    """The route as it applies to this call: the effect of some vLLM routes depends on arguments."""
    if route.path == RPC_ALL:
        method = str(call.argument("method") or "")
        if "weight" in method and not method.startswith(_READING_METHODS):
            return replace(route, kind=Kind.UPDATE, whole=method == "reload_weights")
    elif route.path == SLEEP and call.argument("level") == "2":
        return replace(route, discards=True)
    elif route.path == WEIGHT_CHECKER and call.argument("action") == "reset":
        return replace(route, kind=Kind.UPDATE, discards=True)
    return route


_READING_METHODS: Final = ("get_", "check_", "compute_", "list_", "has_", "is_")


def control_route(config: Config, path: str) -> AdminRoute | None:
    """The configured control route with this path. A route of kind `read` accepts GET, too."""
    for entry in config.control_routes:
        if entry.path == path:
            kind = Kind(entry.kind)
            return AdminRoute(path, kind, READ_METHODS if kind is Kind.READ else ("POST",))
    return None


def is_known(path: str, config: Config) -> bool:
    """Whether the admin API has a route for the (decoded) path, with any method."""
    return is_built_in(path) or control_route(config, path) is not None


def check_routes(config: Config, file: str) -> None:
    """Raises ConfigError for a configured path that is also a built-in route's."""
    paths = [(f"routes[{i}].path", route.path) for i, route in enumerate(config.routes)]
    control = enumerate(config.control_routes)
    paths += [(f"control_routes[{i}].path", route.path) for i, route in control]
    problems = [
        Problem(key, None, f"{path} {conflict}", "choose another path", file)
        for key, path in paths
        if (conflict := _taken(path))
    ]
    if problems:
        raise ConfigError(problems, file)


def _taken(path: str) -> str:
    """Why a configured route can't have this path, or ""."""
    if path in BY_PATH or is_built_in(path):
        return "is a built-in control route"
    try:
        built_in = match_route("POST", path) is not None
    except MethodNotAllowed:
        built_in = True
    return "is a built-in model route" if built_in else ""
