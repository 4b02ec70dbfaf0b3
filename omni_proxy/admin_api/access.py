"""Access to the admin API: the table of roles, admin keys, listeners, CORS.

Invariants: a route that is not listed as open needs a key, and one in no row of the table needs the
role `all`; an unknown route is a 404 without a key. A call of an engine's path through /v1/rl needs
the same role as that path on the proxy. With [admin] listen, closed routes answer only there
(except /metrics); metrics_listen serves only metrics, without a key. The Host header, which the
data plane sets, names the listener of a request. Without a key, `browser_checks` refuses pages of
other origins. CORS fields are added only for GET and HEAD of reading routes.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from quart import Quart, Request, Response, g, request

from omni_proxy.admin_api.browser_checks import READING, SAFE_METHODS, Caller
from omni_proxy.admin_ops.routes import Kind, control_route
from omni_proxy.config.schema import AdminConfig, AdminKey, AdminRole, Config
from omni_proxy.config.validate import API_KEY_NAME
from omni_proxy.routing.routes import (
    MethodNotAllowed,
    configured_routes,
    match_configured,
    match_route,
)
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.cors import Cors
from omni_proxy.wire.errors import HttpError

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


OPEN_PATHS = frozenset(
    (
        "/live", "/ready", "/health", "/liveness", "/readiness", "/health_generate",
        "/workers", "/list_workers", "/v1/models", "/server_info", "/get_server_info",
        "/get_model_info", "/get_loads", "/openapi.json", "/dashboard",
    )
)  # fmt: skip
OPEN_BELOW = ("/workers/", "/v1/models/")
OPEN_POSTS = frozenset(("/finish_session",))  # used by clients of models, without the admin key
PICKS = ("/select", "/reservations/")  # called as often as model routes
ON_BOTH = "/metrics"
ADMIN_HOST = "admin"  # as `dataplane.upstream.pool` writes them
METRICS_HOST = "metrics"


def needs_key(method: str, path: str, admin: AdminConfig) -> bool:
    if method not in SAFE_METHODS:
        return path not in OPEN_POSTS
    if path == "/metrics":
        return not admin.open_metrics
    return path not in OPEN_PATHS and not path.startswith(OPEN_BELOW)


class KeyHolder(NamedTuple):
    """A valid admin key: its name and what it may do."""

    name: str
    role: AdminRole


API_KEY: Final = KeyHolder(API_KEY_NAME, ALL)


def named_key() -> str:
    """The name of the current request's key in [[admin.keys]]; "" for any other key and for none.
    Keys of [[admin.keys]] must not be sent to workers."""
    holder: KeyHolder | None = g.get("key_holder")
    return holder.name if holder is not None and holder != API_KEY else ""


class KeyCheck:
    """Checks a request's key against the current configuration."""

    def __init__(
        self,
        config_store: ConfigStore,
        find_key: Callable[[bytes], AdminKey | None],
        *,
        relays: bool = True,
    ) -> None:
        """`relays`: whether the proxy relays model requests; a picker receives them here."""
        self._config_store = config_store
        self._find_key = find_key
        self._relays = relays

    @property
    def _main_key(self) -> str:
        """The unrestricted key that is not an entry of [[admin.keys]], or ""."""
        config = self._config_store.config
        if config.admin.api_key or config.admin.keys:
            return config.admin.api_key
        return config.server.api_key

    def presented(self) -> bool:
        """Whether the current request may see what a key protects, which every role may."""
        if self.holder() is not None:
            return True
        return self._asks_no_key() and self._caller().known_host()

    def holder(self) -> KeyHolder | None:
        """The holder of the current request's key; None without a valid one."""
        if "key_holder" not in g:
            g.key_holder = self._find(_bearer(request))
        found: KeyHolder | None = g.key_holder
        return found

    def holder_name(self) -> str | None:
        holder = self.holder()
        return holder.name if holder else None

    def _find(self, token: bytes) -> KeyHolder | None:
        if not token:
            return None
        if self._main_key and hmac.compare_digest(token, self._main_key.encode()):
            return API_KEY
        entry = self._find_key(token)
        return KeyHolder(entry.name, entry.role) if entry is not None else None

    def changes_something(self) -> bool:
        """Whether the current request changes something. Picking a worker does not count as a
        change. The route must be known."""
        config = self._config_store.config
        if request.method == "OPTIONS" or request.path.startswith(PICKS):
            return False
        if not needs_key(request.method, request.path, config.admin):
            return False
        return not reads_only(_roles_for(request, config))

    def _asks_no_key(self) -> bool:
        required = self._main_key or self._config_store.config.admin.keys
        return not required or self._trusted_place()

    def _caller(self) -> Caller:
        return Caller(request, self._config_store.config)

    def _trusted_place(self) -> bool:
        """Whether the request came through a listener that requires no key."""
        admin = self._config_store.config.admin
        return bool(admin.listen) and not admin.listen_key and request.host == ADMIN_HOST

    async def before_request(self) -> None:
        """Raises HttpError: 401 for a missing or malformed key; 403 for a wrong key, for a role
        that does not allow the request and for a route that only the other listener serves; and
        those of `refuse_unless_trusted`."""
        admin = self._config_store.config.admin
        self.holder()  # for `named_key`
        if request.host == METRICS_HOST:
            _refuse_all_but_metrics(request)
            return
        unknown = request.routing_exception is not None
        if unknown:
            _refuse_model_traffic(request, self._config_store.config, relays=self._relays)
            return
        closed = needs_key(request.method, request.path, admin)
        if closed and admin.listen and request.path != ON_BOTH and request.host != ADMIN_HOST:
            elsewhere = f"this route answers on the [admin] listen address only: {admin.listen}"
            raise HttpError(
                403, elsewhere, "admin_listener_only", detail=elsewhere, listen=admin.listen
            )
        if self._asks_no_key():
            # A valid key is sufficient: a page of another origin can't send it.
            if self.holder() is None:
                self._caller().refuse_unless_trusted()
        elif closed:
            self._refuse_without_key()

    def _refuse_without_key(self) -> None:
        if not _bearer(request):
            message = "Admin API key required: Authorization: Bearer <key>"
            raise HttpError(401, message, "admin_key_required", detail=message).with_headers(
                ("WWW-Authenticate", "Bearer")
            )
        holder = self.holder()
        if holder is None:
            invalid = "Invalid admin API key"
            raise HttpError(403, invalid, "admin_key_invalid", detail=invalid)
        roles = _roles_for(request, self._config_store.config)
        if holder.role not in roles:
            message = (
                f"{request.method} {request.path} needs an admin key with the role "
                f"{' or '.join(roles)}; {holder.name!r} has the role {holder.role}"
            )
            raise HttpError(
                403, message, "role_not_allowed", detail=message, role=holder.role, roles=roles
            )


def _refuse_all_but_metrics(of: Request) -> None:
    """Raises HttpError 404: this listener requires no key, so it serves metrics only."""
    if of.path != ON_BOTH:
        message = f"the [admin] metrics_listen listener serves GET {ON_BOTH} only"
        raise HttpError(404, message, "metrics_listener", detail="Not Found")


def _refuse_model_traffic(of: Request, config: Config, *, relays: bool) -> None:
    """Raises HttpError 404 for a model route, which only the other listener serves, or no listener
    of a picker."""
    if relays and of.host != ADMIN_HOST:
        return
    try:
        configured = configured_routes(config.routes)
        route = match_route(of.method, of.path) or match_configured(configured, of.method, of.path)
        served = route is not None
    except MethodNotAllowed:
        served = True
    if served and relays:
        elsewhere = "the [admin] listener takes control requests only, no model traffic"
        raise HttpError(404, elsewhere, "admin_listener", detail="Not Found")
    if served:
        elsewhere = "omni-proxy picker relays nothing: ask for a worker with POST /select"
        raise HttpError(404, elsewhere, "picker_only", detail="Not Found")


def _bearer(of: Request) -> bytes:
    """The bearer token of the request, b"" if it is missing or malformed."""
    scheme, _, token = of.headers.get("Authorization", "").strip().partition(" ")
    # Quart decodes header bytes as latin-1: this restores the received bytes.
    return token.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


def _roles_for(of: Request, config: Config) -> tuple[AdminRole, ...]:
    """The roles that may send this request, of a known route."""
    configured = control_route(config, of.path)
    rule = of.url_rule.rule if of.url_rule is not None else ""
    engine_path = str((of.view_args or {}).get("path", ""))
    kind = configured.kind if configured is not None else None
    return roles_for(of.method, rule, engine_path=engine_path, kind=kind)


METHODS = ("GET", "HEAD")


class OpenReads:
    """CORS of reading routes that need no key. Mounted on an app once; runs before its routes."""

    def __init__(self, config_store: ConfigStore) -> None:
        self._config_store = config_store

    def mount(self, app: Quart) -> None:
        app.before_request(self._preflight)
        app.after_request(self._allowed)

    def _cors(self) -> Cors | None:
        """None for routes that need a key."""
        config, rule = self._config_store.config, request.url_rule
        if rule is None or rule.rule not in READING or needs_key("GET", request.path, config.admin):
            return None
        server = config.server
        return Cors(server.cors_allow_origins, filter(None, (server.request_id_header,)))

    async def _preflight(self) -> Response | None:
        if request.method != "OPTIONS" or "Origin" not in request.headers:
            return None
        cors = self._cors()
        if cors is None or request.headers.get("Access-Control-Request-Method") not in METHODS:
            return None
        requested_headers = request.headers.get("Access-Control-Request-Headers")
        fields = cors.preflight(request.headers["Origin"], METHODS, requested_headers)
        return Response("", 200, dict(fields), content_type="text/plain") if fields else None

    async def _allowed(self, response: Response) -> Response:
        cors = self._cors() if request.method in METHODS else None
        if cors is not None and "Origin" in request.headers:
            response.headers.extend(cors.fields(request.headers["Origin"]))
        return response
