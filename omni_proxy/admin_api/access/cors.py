"""CORS of the admin API: fields only for GET and HEAD of reading routes that need no key."""

from __future__ import annotations

from quart import Quart, Response, request

from omni_proxy.admin_api.access.browser_checks import READING
from omni_proxy.admin_api.access.key_check import needs_key
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.cors import Cors

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
