"""Browsers: refuses requests sent for a page of another origin (CSRF, DNS rebinding), except that
such pages may read the routes that need no key (CORS).

Invariant: without a key a client is authorized by its network address, and every page that a
browser visits shares that address. So control routes answer only under a Host that outsiders can't
resolve to the proxy (DNS rebinding), and only same-origin requests may change something. A route
that is not listed in READING counts as a change, whatever its method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quart import Quart, Request, Response, request

from omni_proxy.admin_api.access.roles import MODEL_CLIENT_POSTS, SAFE_METHODS, needs_key
from omni_proxy.config.schema import Config
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.shared.origins import (
    Origin,
    hostname_of,
    is_from_foreign_page,
    is_local_name,
    parse_origin,
    shows_browser,
)
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
        "/metrics", "/engine_metrics", "/explain", "/feed", "/history", "/keys", "/config",
        "/dashboard", "/openapi.json", "/weights", "/weights/versions", "/weights/rollout",
        "/v1/rl/workers", "/v1/rl/workers/<path:name>", "/is_paused", "/is_sleeping",
        "/get_world_size", "/weight_info",
    )
)  # fmt: skip
# Served under any Host: health routes, because load balancers and Kubernetes use a service's name;
# the model list, which model clients fetch; and the dashboard's page, which contains no data.
ANY_HOST: Final = frozenset(
    (
        "/live", "/ready", "/health", "/liveness", "/readiness", "/health_generate", "/v1/models",
        "/v1/models/<path:model>", "/dashboard",
    )
)  # fmt: skip


def reads(method: str, rule: str) -> bool:
    return method == "OPTIONS" or (method in SAFE_METHODS and rule in READING)


def received_via(of: Request) -> ReceivedVia:
    """The scheme, the Host and the kind of the client's connection. A request without the data
    plane's header came directly over the private socket, which only this program can reach."""
    message = of.headers.get(FIELD.decode())
    if message is None:
        return ReceivedVia(of.scheme, of.host, local=True)
    return read_received(message)


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
        return received_via(self.request)

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
        if self._rule in MODEL_CLIENT_POSTS:
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
        if is_from_foreign_page(self.request.headers, self._own_origin()):
            raise _forbidden(
                "pages of another origin can't change anything while no key is required: set "
                "[admin] api_key; behind a proxy that changes Host or scheme, [server] forwarded = "
                '"append"',
                "cross_site",
            )
        if not shows_browser(self.request.headers):
            return
        if self.request.method in SAFE_METHODS:
            message = f"{self.request.method} from a browser can't change anything: send POST"
            raise _forbidden(message, "browser_get")
        # The data plane frames each body by Content-Length.
        if self.request.content_length and not self.request.is_json:
            message = "a browser must send the body as application/json"
            raise HttpError(415, message, "unsupported_media_type", detail=message)


def _forbidden(message: str, code: str) -> HttpError:
    return HttpError(403, message, code, detail=message)


READ_METHODS = ("GET", "HEAD")


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
        if cors is None or request.headers.get("Access-Control-Request-Method") not in READ_METHODS:
            return None
        requested_headers = request.headers.get("Access-Control-Request-Headers")
        fields = cors.preflight(request.headers["Origin"], READ_METHODS, requested_headers)
        return Response("", 200, dict(fields), content_type="text/plain") if fields else None

    async def _allowed(self, response: Response) -> Response:
        cors = self._cors() if request.method in READ_METHODS else None
        if cors is not None and "Origin" in request.headers:
            response.headers.extend(cors.fields(request.headers["Origin"]))
        return response
