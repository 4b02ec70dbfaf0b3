"""What a route needs: no key, or an admin key with one of the roles in a table.

Invariants: a route that is not listed as open needs a key, and one in no row of the table needs the
role `all`. A call of an engine's path through /v1/rl needs the same role as that path on the proxy.
Must not know the current request.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from omni_proxy.admin_ops.admin_route_table import Kind
from omni_proxy.config.schema import AdminConfig, AdminRole

SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
OPEN_PATHS = frozenset(
    (
        "/live", "/ready", "/health", "/liveness", "/readiness", "/health_generate",
        "/workers", "/list_workers", "/v1/models", "/server_info", "/get_server_info",
        "/get_model_info", "/get_loads", "/openapi.json", "/dashboard",
    )
)  # fmt: skip
OPEN_BELOW = ("/workers/", "/v1/models/")
# Sent by model clients: served under any Host, and without the admin key.
MODEL_CLIENT_POSTS: Final = frozenset(("/finish_session",))


def needs_key(method: str, path: str, admin: AdminConfig) -> bool:
    if method not in SAFE_METHODS:
        return path not in MODEL_CLIENT_POSTS
    if path == "/metrics":
        return not admin.open_metrics
    return path not in OPEN_PATHS and not path.startswith(OPEN_BELOW)


ALL: Final[AdminRole] = "all"
ANY_METHOD: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")


class RoleRow(NamedTuple):
    """`paths`: `*` is a parameter. `engine_only`: applies only to engines' paths, below
    /v1/rl/engine/ and /v1/rl/workers/*/engine/; the other rows apply there, too."""

    roles: tuple[AdminRole, ...]
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    engine_only: bool = False


_READERS: Final[tuple[AdminRole, ...]] = ("read", "operate", "weights")
ROLE_TABLE: Final = (
    RoleRow(_READERS, ("GET",), (
        "/status", "/config", "/explain", "/feed", "/history", "/keys", "/metrics",
        "/engine_metrics", "/v1/loads", "/weights", "/weights/versions", "/weights/rollout",
        "/model_info", "/weight_info", "/is_paused", "/is_sleeping", "/get_world_size",
        "/v1/rl/workers", "/v1/rl/workers/*",
    )),
    RoleRow(_READERS, ("POST",), ("/explain", "/model_info")),
    RoleRow(_READERS, ("GET",), (
        "/health", "/v1/models", "/get_model_info", "/get_load", "/get_loads",
        "/get_weight_version", "/version",
    ), engine_only=True),
    RoleRow(("operate",), ANY_METHOD, (
        "/workers", "/workers/*", "/workers/*/drain", "/add_worker", "/remove_worker", "/reload",
        "/flush_cache", "/reset_prefix_cache", "/start_profile", "/stop_profile",
    )),
    RoleRow(("operate", "weights"), ANY_METHOD, (
        "/abort_request", "/abort_requests", "/select", "/select_and_reserve", "/reservations/*",
    )),
    RoleRow(("weights",), ANY_METHOD, (
        "/pause_generation", "/continue_generation", "/pause", "/resume", "/sleep", "/wake_up",
        "/init_weights_update_group", "/prepare_weights_update", "/complete_weights_update",
        "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update",
        "/update_weights_from_disk", "/update_weights_from_distributed",
        "/update_weights_from_tensor", "/update_weight_version", "/get_weights_by_name",
        "/weights_checker", "/weight_checker", "/init_weight_transfer_engine",
        "/start_weight_update", "/start_draft_weight_update", "/update_weights",
        "/finish_weight_update", "/shutdown_weight_transfer_engine", "/collective_rpc",
        "/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter", "/weights/resolve", "/weight_update_journal/resolve",
        "/weights/rollback", "/weights/rollout", "/weights/rollout/pause",
        "/weights/rollout/resume", "/weights/rollout/cancel", "/weights/sync/abort",
    )),
    RoleRow(("weights",), ANY_METHOD, (
        "/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_ipc",
        "/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance",
    ), engine_only=True),
)  # fmt: skip
# The roles for routes of [[control_routes]], by their kind.
ROLES_OF_KIND: Final[dict[Kind, tuple[AdminRole, ...]]] = {
    Kind.READ: _READERS,
    Kind.PLAIN: ("operate",),
    Kind.PAUSE: ("weights",),
    Kind.CONTINUE: ("weights",),
    Kind.GROUP: ("weights",),
    Kind.UPDATE: ("weights",),
}

_ENGINE_PATTERNS: Final = ("/v1/rl/engine/*", "/v1/rl/workers/*/engine/*")
_PARAMETER: Final = re.compile(r"<[^>]*>|{[^}]*}")


def _index(*, engine: bool) -> dict[tuple[str, str], tuple[AdminRole, ...]]:
    rows: dict[tuple[str, str], tuple[AdminRole, ...]] = {}
    for row in ROLE_TABLE:
        if engine or not row.engine_only:
            for path in row.paths:
                for method in row.methods:
                    # Earlier rows are narrower and take precedence.
                    rows.setdefault((method, path), row.roles)
    return rows


_OWN: Final = _index(engine=False)
_OF_ENGINES: Final = _index(engine=True)


def roles_for(
    method: str, rule: str, *, engine_path: str = "", kind: Kind | None = None
) -> tuple[AdminRole, ...]:
    """The roles that may call a route that needs a key.

    `rule`: the path with its parameters in <> or {}. `engine_path`: for /v1/rl/…/engine/ routes
    the engine's path, without its first slash. `kind`: for a route of [[control_routes]].
    """
    method = "GET" if method in ("HEAD", "OPTIONS") else method
    if kind is not None:
        return (*ROLES_OF_KIND.get(kind, ()), ALL)
    pattern = _PARAMETER.sub("*", rule)
    if pattern in _ENGINE_PATTERNS:
        return (*_OF_ENGINES.get((method, f"/{engine_path}"), ()), ALL)
    return (*_OWN.get((method, pattern), ()), ALL)


def reads_only(roles: tuple[AdminRole, ...]) -> bool:
    """Whether a route that these roles may call changes nothing."""
    return "read" in roles
