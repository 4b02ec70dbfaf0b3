"""Admin keys: whether a request has the key that it needs, who its caller is, and which listener
serves which route.

Invariants: an unknown route is a 404 without a key. With [admin] listen, closed routes answer only
there (except /metrics); metrics_listen serves only metrics, without a key. The Host header, which
the data plane sets, names the listener of a request. Without a key, `browser_checks` refuses pages
of other origins. The name of a caller contains no key.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Final, NamedTuple

from quart import Request, g, request

from omni_proxy.admin_api.access.browser_checks import Caller
from omni_proxy.admin_api.access.roles import ALL, needs_key, reads_only, roles_for
from omni_proxy.admin_ops.admin_route_table import control_route
from omni_proxy.config.schema import AdminKey, AdminRole, Config
from omni_proxy.config.validate import API_KEY_NAME
from omni_proxy.dataplane.upstream.pool import ADMIN_HOST, METRICS_HOST
from omni_proxy.routing.routes import (
    MethodNotAllowed,
    configured_routes,
    find_route,
)
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.proxy_protocol import FIELD, peer_host

PICKS = ("/select", "/reservations/")  # called as often as model routes
ON_BOTH = "/metrics"
PEER: Final = FIELD.decode()
PROGRAM_CHARS: Final = 120


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


def caller() -> str:
    """The caller for logs and records: its program, its address, and the name of its key."""
    agent = _program()
    addresses = request.headers.getlist(PEER)
    text = f"{agent} from {peer_host(addresses[-1])}".strip() if addresses else agent
    return f"{key} ({text})" if (key := named_key()) else text


def _program() -> str:
    """`dashboard` for a page of this proxy, `browser` for other requests of a browser, else the
    first product of the User-Agent (RFC 9110, 10.1.5); "" without one."""
    agent = request.headers.get("User-Agent", "").split()
    if not agent or not agent[0].startswith("Mozilla/"):
        return agent[0][:PROGRAM_CHARS] if agent else ""
    # Control routes refuse pages of other origins. Over plain HTTP to another machine a browser
    # sends only Origin.
    own_page = request.headers.get("Sec-Fetch-Site") == "same-origin" or "Origin" in request.headers
    return "dashboard" if own_page else "browser"


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
        holder: KeyHolder | None = g.key_holder
        return holder

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
            message = f"this route answers on the [admin] listen address only: {admin.listen}"
            raise HttpError(
                403, message, "admin_listener_only", detail=message, listen=admin.listen
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
        route = find_route(configured, of.method, of.path)
        served = route is not None
    except MethodNotAllowed:
        served = True
    if served and relays:
        message = "the [admin] listener takes control requests only, no model traffic"
        raise HttpError(404, message, "admin_listener", detail="Not Found")
    if served:
        message = "omni-proxy picker relays nothing: ask for a worker with POST /select"
        raise HttpError(404, message, "picker_only", detail="Not Found")


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
