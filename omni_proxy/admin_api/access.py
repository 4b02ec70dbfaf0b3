"""Who may call the admin API: the admin key, the checks of browser requests, CORS.

Invariant: a new route that is not listed as open is closed; an unknown route is a 404 without a
key. With [admin] listen, closed routes answer there only (except /metrics); metrics_listen serves
metrics only, without a key. The Host header, which the data plane sets, has the request's listener.
Without a key the client's place in the network authorizes it, and any page that a browser visits
shares that place. So control routes answer only under a Host that no stranger can point at the
proxy (DNS rebinding), and only same-origin requests change something: a route that is not listed in
READING changes something, whatever its method. CORS fields are for GET and HEAD of reading routes.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from quart import Quart, Request, Response, request

from omni_proxy.config.schema import AdminConfig, Config
from omni_proxy.origins import NO_ORIGIN, Origin, hostname_of, is_local_name, parse_origin
from omni_proxy.routing.routes import (
    MethodNotAllowed,
    configured_routes,
    match_configured,
    match_route,
)
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.cors import Cors
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.forwarded import FIELD, ReceivedVia, read_received

# Rules as mounted; their GET changes nothing.
READING: Final = frozenset(
    (
        "/live", "/ready", "/health", "/liveness", "/readiness", "/health_generate", "/status",
        "/workers", "/workers/<path:name>", "/list_workers", "/v1/models",
        "/v1/models/<path:model>", "/server_info",
        "/get_server_info", "/get_model_info", "/model_info", "/get_loads", "/v1/loads",
        "/metrics", "/engine_metrics", "/feed", "/config", "/dashboard", "/openapi.json",
        "/weights", "/weights/versions", "/weights/rollout", "/v1/rl/workers",
        "/v1/rl/workers/<path:name>", "/is_paused", "/is_sleeping", "/get_world_size",
        "/weight_info",
    )
)  # fmt: skip
# Under any Host: health, because load balancers and Kubernetes use a service's name; what a client
# of models requests before its first request; and a page without data of this proxy.
ANY_HOST: Final = frozenset(
    (
        "/live", "/ready", "/health", "/liveness", "/readiness", "/health_generate", "/v1/models",
        "/v1/models/<path:model>", "/dashboard",
    )
)  # fmt: skip
# Sent by clients of models beside their requests: under any Host.
ANY_HOST_POST: Final = frozenset(("/finish_session",))
SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_OWN_SITES: Final = ("none", "same-origin")
_PAGE_MODES: Final = ("navigate", "no-cors", "same-origin", "websocket")


def reads(method: str, rule: str) -> bool:
    return method == "OPTIONS" or (method in SAFE_METHODS and rule in READING)


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a request to a control route."""

    request: Request
    config: Config

    @property
    def _rule(self) -> str:
        rule = self.request.url_rule
        return rule.rule if rule is not None else ""

    @property
    def _received(self) -> ReceivedVia:
        """Without the data plane's header the request came directly over the private socket, which
        only this program can reach."""
        message = self.request.headers.get(FIELD.decode())
        if message is None:
            return ReceivedVia(self.request.scheme, self.request.host, local=True)
        return read_received(message)

    def refuse_unless_trusted(self) -> None:
        """Raises HttpError 403 or 415 for a request that may come from a foreign page."""
        if not self.known_host() and not self._open_to_any_host():
            raise _forbidden(
                f"without an admin key control routes answer only for a Host that is an address, "
                f"localhost or listed: add {hostname_of(self._received.host)!r} to [admin] "
                f"allowed_hosts, or set [admin] api_key",
                "host_not_allowed",
            )
        if not reads(self.request.method, self._rule):
            self._refuse_page()

    def known_host(self) -> bool:
        """Whether DNS rebinding can be excluded for the Host of this request."""
        received = self._received
        hosts = {received.host, *self._forwarded("Host")}
        if received.local:  # no browser connects to a Unix socket; a proxy in between sets Host
            hosts.discard(received.host)
        return all(map(self._is_known, hosts))

    def _is_known(self, host: str) -> bool:
        name = hostname_of(host)  # browsers always send a host
        return not name or is_local_name(name) or name in self.config.admin.allowed_hosts

    def _open_to_any_host(self) -> bool:
        if self._rule == "/metrics":
            return self.config.admin.open_metrics
        if self._rule in ANY_HOST_POST:
            return True
        return self._rule in ANY_HOST and self.request.method in SAFE_METHODS

    def _forwarded(self, name: str) -> list[str]:
        """X-Forwarded-`name`, the client's value first, if [server] trusts that header."""
        if self.config.server.forwarded != "append":
            return []
        values = ",".join(self.request.headers.getlist(f"X-Forwarded-{name}"))
        return [value.strip() for value in values.split(",") if value.strip()]

    def _own_origin(self) -> Origin:
        received = self._received
        scheme = next(iter(self._forwarded("Proto")), received.scheme).lower()
        host = next(iter(self._forwarded("Host")), received.host)
        return parse_origin(f"{scheme}://{host}")

    def _refuse_page(self) -> None:
        if self._is_foreign():
            raise _forbidden(
                "a page of another origin may change nothing while no key is required: set "
                "[admin] api_key; behind a proxy that changes Host or scheme, [server] forwarded = "
                '"append"',
                "cross_site",
            )
        if not self._shows_browser():
            return
        if self.request.method in SAFE_METHODS:
            message = f"{self.request.method} of a browser may change nothing: send POST"
            raise _forbidden(message, "browser_get")
        # The data plane frames each body by Content-Length.
        if self.request.content_length and not self.request.is_json:
            message = "a browser's body must be application/json here"
            raise HttpError(415, message, "unsupported_media_type", detail=message)

    def _is_foreign(self) -> bool:
        """Whether its headers name a page of another origin."""
        sites = self.request.headers.getlist("Sec-Fetch-Site")
        if any(site not in _OWN_SITES for site in sites):
            return True
        # Browsers that send no Origin with a form's POST send at least Referer.
        origins = self.request.headers.getlist("Origin") or self.request.headers.getlist("Referer")
        own_origin = self._own_origin()
        return any(
            parse_origin(value) != own_origin or own_origin == NO_ORIGIN for value in origins
        )

    def _shows_browser(self) -> bool:
        return any(self._signs())

    def _signs(self) -> Iterator[bool]:
        headers = self.request.headers
        for name in ("Origin", "Referer", "Sec-Fetch-Site", "Sec-Fetch-Dest", "Sec-Fetch-User"):
            yield name in headers
        # To plain HTTP beyond this machine an image request has no other sign.
        yield headers.get("User-Agent", "").startswith("Mozilla/")
        # fetch() of other programs (Node) sends "cors" and none of the others.
        yield headers.get("Sec-Fetch-Mode") in _PAGE_MODES


def _forbidden(message: str, code: str) -> HttpError:
    return HttpError(403, message, code, detail=message)


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


METHODS = ("GET", "HEAD")


class OpenReads:
    """Mounted on an app once; runs before its routes."""

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
