"""Who needs the admin key: everything, except what is listed here as open.

Invariant: a route that is added and forgotten here is closed. A request for a route that doesn't
exist learns that without a key.
"""

from __future__ import annotations

import hmac

from quart import Request, request

from omni_proxy.config.schema import Admin
from omni_proxy.watch.keeper import Keeper
from omni_proxy.wire.errors import Refusal

SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
OPEN_PATHS = frozenset(
    (
        "/live", "/ready", "/health", "/liveness", "/readiness", "/health_generate",
        "/workers", "/list_workers", "/v1/models", "/server_info", "/get_server_info",
        "/get_model_info", "/get_loads", "/openapi.json", "/dashboard",
    )
)  # fmt: skip
OPEN_PREFIX = "/workers/"


def needs_key(method: str, path: str, admin: Admin) -> bool:
    if method not in SAFE_METHODS:
        return True
    if path == "/metrics":
        return not admin.open_metrics
    return path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX)


class KeyCheck:
    """Compares what a request presents with the key that is configured now."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @property
    def key(self) -> str:
        """The configured key; "" is none, and everything is open."""
        return self._keeper.config.admin.api_key

    def presented(self) -> bool:
        """Whether the present request may see what only key holders see."""
        return not self.key or _matches(_bearer(request), self.key)

    async def before_request(self) -> None:
        """Raises Refusal 401 where a due key is missing or malformed, 403 where it is wrong."""
        admin = self._keeper.config.admin
        unknown = request.routing_exception is not None
        if unknown or not self.key or not needs_key(request.method, request.path, admin):
            return
        given = _bearer(request)
        if not given:
            wanted = "Admin API key required: Authorization: Bearer <key>"
            raise Refusal(401, wanted, "admin_key_required", detail=wanted).with_headers(
                ("WWW-Authenticate", "Bearer")
            )
        if not _matches(given, self.key):
            wrong = "Invalid admin API key"
            raise Refusal(403, wrong, "admin_key_invalid", detail=wrong)


def _bearer(of: Request) -> bytes:
    """The token that was sent, or nothing when there is none or it is malformed."""
    scheme, _, token = of.headers.get("Authorization", "").strip().partition(" ")
    # Quart decodes header bytes as latin-1: this gives back what came over the wire.
    return token.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


def _matches(given: bytes, key: str) -> bool:
    return hmac.compare_digest(given, key.encode())
