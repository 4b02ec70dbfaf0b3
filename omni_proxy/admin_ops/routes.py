"""The admin routes as a table: the effect of each on its workers, and so what it needs.

kind      lock and journal   cordon reason       afterwards
read      no                 -                   -
plain     no                 -                   -
flush     no                 -                   prefix caches are cleared
continue  no                 -                   "paused" ends where it succeeded
pause     yes                paused              stays paused, as `while_paused` says
group     yes                updating            a failed init disables its worker
update    yes                updating            failed workers are uncertain, see operation.py
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What a route does to a worker."""

    READ = "read"
    PLAIN = "plain"  # it changes nothing that routing or weights must know
    FLUSH = "flush"
    CONTINUE = "continue"
    PAUSE = "pause"
    GROUP = "group"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """`whole`: its success replaces all weights. `receives`: a refusal says nothing of them.

    `labels` only: it touches a name and no weight.
    """

    path: str
    kind: Kind
    methods: tuple[str, ...] = ("POST",)
    whole: bool = False
    receives: bool = False
    labels: bool = False

    @property
    def takes_turn(self) -> bool:
        """One at a time over the fleet, written down before its first call leaves."""
        return self.kind in (Kind.PAUSE, Kind.GROUP, Kind.UPDATE)

    @property
    def hold(self) -> str:
        """Why its targets are out of routing while it runs; "" where they are not."""
        if not self.takes_turn:
            return ""
        return "paused" if self.kind is Kind.PAUSE else "updating"

    @property
    def drains(self) -> bool:
        """Whether what is in flight may get time to end first."""
        return self.kind in (Kind.PAUSE, Kind.UPDATE)

    @property
    def name(self) -> str:
        return self.path.removeprefix("/")


INIT: Final = "/init_weights_update_group"
PREPARE: Final = "/prepare_weights_update"
COMPLETE: Final = "/complete_weights_update"
DESTROY: Final = "/destroy_weights_update_group"
END: Final = "/end_weight_update"
FROM_DISTRIBUTED: Final = "/update_weights_from_distributed"
FROM_TENSOR: Final = "/update_weights_from_tensor"
MODEL_INFO: Final = "/model_info"
_READ: Final = ("GET", "POST")

ROUTES: Final = (
    AdminRoute(MODEL_INFO, Kind.READ, _READ),
    AdminRoute("/weights_checker", Kind.READ, _READ),
    AdminRoute("/get_weights_by_name", Kind.READ, _READ),
    AdminRoute("/flush_cache", Kind.FLUSH, _READ),
    AdminRoute("/start_profile", Kind.PLAIN),
    AdminRoute("/stop_profile", Kind.PLAIN),
    AdminRoute("/continue_generation", Kind.CONTINUE),
    AdminRoute("/pause_generation", Kind.PAUSE),
    AdminRoute(INIT, Kind.GROUP),
    AdminRoute(PREPARE, Kind.GROUP),
    AdminRoute(COMPLETE, Kind.UPDATE, receives=True),
    AdminRoute(DESTROY, Kind.GROUP),
    AdminRoute("/begin_weight_update", Kind.GROUP),
    AdminRoute(END, Kind.UPDATE, receives=True),
    AdminRoute("/update_weights_from_disk", Kind.UPDATE, whole=True),
    AdminRoute(FROM_DISTRIBUTED, Kind.UPDATE, receives=True),
    AdminRoute(FROM_TENSOR, Kind.UPDATE, receives=True),
    AdminRoute("/update_weight_version", Kind.UPDATE, labels=True),
)
BY_PATH: Final = {route.path: route for route in ROUTES}
RESOLVES: Final = ("/weights/resolve", "/weight_update_journal/resolve")
# Whoever refuses one of these says `success`, `message` and `status` at the top, too.
ROLLBACK: Final = AdminRoute("/weights/rollback", Kind.UPDATE, whole=True)
ROLLOUT: Final = AdminRoute("/weights/rollout", Kind.UPDATE, whole=True)
STEER_ROLLOUT: Final = tuple(f"{ROLLOUT.path}/{step}" for step in ("pause", "resume", "cancel"))
TOPPED: Final = frozenset((*BY_PATH, *RESOLVES, ROLLBACK.path, ROLLOUT.path, *STEER_ROLLOUT))
CONTINUE: Final = BY_PATH["/continue_generation"]
# Everything else that the front answers: a path, or what begins with one of these.
_PATHS: Final = frozenset(
    (
        "/live", "/ready", "/health", "/liveness", "/readiness", "/health_generate", "/status",
        "/workers", "/list_workers", "/add_worker", "/remove_worker", "/config", "/reload",
        "/server_info", "/get_server_info", "/get_model_info", "/get_loads", "/v1/loads",
        "/v1/models", "/metrics", "/engine_metrics", "/explain", "/feed", "/dashboard",
        "/openapi.json", "/weights", "/weights/versions", "/v1/rl/workers",
    )
)  # fmt: skip
_BELOW: Final = ("/workers/", "/v1/models/", "/v1/rl/workers/", "/v1/rl/engine/")


def paths() -> frozenset[str]:
    """Those of the front that are spelled out."""
    return TOPPED | _PATHS


def is_known(path: str) -> bool:
    """Whether the front has a route for it, whatever the method; `path` is decoded."""
    path = "/" + path.lstrip("/")  # so the front reads it
    return path in TOPPED or path in _PATHS or path.startswith(_BELOW)
