"""Authorization: every route needs the admin key, except those listed here as open.

Invariant: a new route that is not listed is closed. A request for an unknown route gets a 404
without a key. With [admin] listen, closed routes answer there only (except /metrics, which is
scraped on the model listener); the Host header, which the data plane sets, has the listener of a
request. The metrics_listen listener serves metrics only, without a key. Without a key
`browser_origin` decides.
"""

from __future__ import annotations

import hmac

from quart import Request, request

from omni_proxy.admin_api.access.browser_origin import SAFE_METHODS, Caller
from omni_proxy.config.schema import AdminConfig, Config
from omni_proxy.routing.routes import (
    MethodNotAllowed,
    configured_routes,
    match_configured,
    match_route,
)
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError

OPEN_PATHS = frozenset(
    (
        "/live", "/ready", "/health", "/liveness", "/readiness", "/health_generate",
        "/workers", "/list_workers", "/v1/models", "/server_info", "/get_server_info",
        "/get_model_info", "/get_loads", "/openapi.json", "/dashboard",
    )
)  # fmt: skip
OPEN_BELOW = ("/workers/", "/v1/models/")
OPEN_POSTS = frozenset(("/finish_session",))  # used by clients of models, without the admin key
ON_BOTH = "/metrics"
ADMIN_HOST = "admin"  # as `dataplane.upstream.pool` writes them
METRICS_HOST = "metrics"


def needs_key(method: str, path: str, admin: AdminConfig) -> bool:
    if method not in SAFE_METHODS:
        return path not in OPEN_POSTS
    if path == "/metrics":
        return not admin.open_metrics
    return path not in OPEN_PATHS and not path.startswith(OPEN_BELOW)


class KeyCheck:
    """Compares what a request presents with the key that is configured now."""

    def __init__(self, config_store: ConfigStore) -> None:
        self._config_store = config_store

    @property
    def key(self) -> str:
        """The configured key; "" is none, and everything is open."""
        config = self._config_store.config
        return config.admin.api_key or config.server.api_key

    def presented(self) -> bool:
        """Whether the current request may see what the key protects."""
        if self.key and _matches(_bearer(request), self.key):
            return True
        return self._asks_no_key() and self._caller().known_host()

    def _asks_no_key(self) -> bool:
        return not self.key or self._trusted_place()

    def _caller(self) -> Caller:
        return Caller(request, self._config_store.config)

    def _trusted_place(self) -> bool:
        """Whether the request came through a listener that requires no key."""
        admin = self._config_store.config.admin
        return bool(admin.listen) and not admin.listen_key and request.host == ADMIN_HOST

    async def before_request(self) -> None:
        """Raises HttpError 401 for a missing or malformed key, 403 for a wrong one and for a route
        that only the other listener serves, and what `refuse_unless_trusted` raises."""
        admin = self._config_store.config.admin
        if request.host == METRICS_HOST:
            _refuse_all_but_metrics(request)
            return
        unknown = request.routing_exception is not None
        if unknown:
            _refuse_model_traffic(request, self._config_store.config)
            return
        closed = needs_key(request.method, request.path, admin)
        if closed and admin.listen and request.path != ON_BOTH and request.host != ADMIN_HOST:
            elsewhere = f"this route answers on the [admin] listen address only: {admin.listen}"
            raise HttpError(
                403, elsewhere, "admin_listener_only", detail=elsewhere, listen=admin.listen
            )
        if self._asks_no_key():
            # A right key is sufficient: no foreign page can send it.
            if not self.key or not _matches(_bearer(request), self.key):
                self._caller().refuse_unless_trusted()
        elif closed:
            self._refuse_without_key()

    def _refuse_without_key(self) -> None:
        token = _bearer(request)
        if not token:
            message = "Admin API key required: Authorization: Bearer <key>"
            raise HttpError(401, message, "admin_key_required", detail=message).with_headers(
                ("WWW-Authenticate", "Bearer")
            )
        if not _matches(token, self.key):
            invalid = "Invalid admin API key"
            raise HttpError(403, invalid, "admin_key_invalid", detail=invalid)


def _refuse_all_but_metrics(of: Request) -> None:
    """Raises HttpError 404: that listener has no access check but its address."""
    if of.path != ON_BOTH:
        message = f"the [admin] metrics_listen listener serves GET {ON_BOTH} only"
        raise HttpError(404, message, "metrics_listener", detail="Not Found")


def _refuse_model_traffic(of: Request, config: Config) -> None:
    """Raises HttpError 404 for what would be routed to a worker on the other listener."""
    if of.host != ADMIN_HOST:
        return
    try:
        configured = configured_routes(config.routes)
        route = match_route(of.method, of.path) or match_configured(configured, of.method, of.path)
        served = route is not None
    except MethodNotAllowed:
        served = True
    if served:
        elsewhere = "the [admin] listener takes control requests only, no model traffic"
        raise HttpError(404, elsewhere, "admin_listener", detail="Not Found")


def _bearer(of: Request) -> bytes:
    """The bearer token of the request, b"" if it is missing or malformed."""
    scheme, _, token = of.headers.get("Authorization", "").strip().partition(" ")
    # Quart decodes header bytes as latin-1: this restores the received bytes.
    return token.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


def _matches(token: bytes, key: str) -> bool:
    return hmac.compare_digest(token, key.encode())
