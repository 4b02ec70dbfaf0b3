"""Cross-origin requests: CORS headers, and protection of admin routes from foreign web pages.

Any page may use model routes and read-only routes (note:api-server 1.0). Without an admin key, the
only credential is the caller's network location, which any web page in a user's browser shares.
Invariant: a route that is not listed as open refuses requests from pages of another origin, GET
requests of browsers, and browser requests with a Host whose DNS record may be an attacker's (DNS
rebinding). With an admin key nothing is refused here: the key is the stronger check. Every response
varies by origin, except the plain 500 of an unexpected error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.datastructures import Headers

from omni_proxy.replica.api.common.errors import DetailError
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.shared.origins import (
    hostname_of,
    is_from_foreign_page,
    is_local_name,
    parse_origin,
    shows_browser,
)

# Model routes, open for every method.
MODEL_ROUTES: Final = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate",
        "/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/speech/stream",
        "/v1/audio/speech/<request_id>", "/v1/audio/transcriptions", "/v1/audio/translations",
        "/v1/audio/diarizations", "/v1/audio/voices", "/v1/audio/voices/<name>",
        "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize",
        "/v1/chat/completions/render", "/v1/completions/render",
        "/inference/v1/generate", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/responses", "/v1/responses/<response_id>", "/v1/responses/<response_id>/cancel",
    )
)  # fmt: skip
# Routes whose GET only reads.
READ_ROUTES: Final = frozenset(
    (
        "/health", "/health_generate", "/v1/models", "/v1/models/<path:name>", "/favicon.ico",
        "/get_model_info", "/model_info", "/server_info", "/get_server_info", "/v1/loads",
        "/get_loads", "/get_load", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect",
        "/redoc", "/is_paused", "/is_sleeping", "/get_world_size", "/version", "/load", "/ping",
        "/weight_info",
    )
)  # fmt: skip
SAFE_METHODS: Final = ("GET", "HEAD")


def is_open(method: str, rule: str) -> bool:
    """Whether a page of any origin may call this route."""
    reading = method in SAFE_METHODS and rule in READ_ROUTES
    return method == "OPTIONS" or reading or rule in MODEL_ROUTES


def refuse_cross_origin(app: QuartTrio, context: RouteContext) -> None:
    """Check every request before its body is read; refused requests get 403."""
    app.before_request(_check_for(context))


def _check_for(context: RouteContext) -> Callable[[], Awaitable[None]]:
    async def check() -> None:
        rule = request.url_rule
        if context.admin_api_key or rule is None or is_open(request.method, rule.rule):
            return
        own = parse_origin(f"{request.scheme}://{request.host}")
        if is_from_foreign_page(request.headers, own):
            message = "refused for pages of another origin: set --admin-api-key to allow it"
            raise DetailError(403, f"cross_site: {message}")
        # A proxy may forward only these headers of a browser's request.
        if _has_origin_headers(request.headers) and not is_local_name(hostname_of(request.host)):
            message = f"refused for pages at {request.host}: a name can point to any address; use"
            raise DetailError(403, f"cross_site: {message} the address, or set --admin-api-key")
        if request.method in SAFE_METHODS and shows_browser(request.headers):
            raise DetailError(403, f"{request.method} requests of browsers are refused: send POST")

    return check


def _has_origin_headers(headers: Headers) -> bool:
    """Whether an origin header is set: all browser requests have one, except plain GETs."""
    return any(name in headers for name in ("Origin", "Referer", "Sec-Fetch-Site"))


METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
PREFLIGHT_SECS = 600


def add_cors_headers(app: QuartTrio) -> None:
    app.before_request(_preflight)
    app.after_request(_add_headers)


async def _preflight() -> Response | None:
    method = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or "Origin" not in request.headers or method is None:
        return None
    headers = {
        "access-control-allow-methods": METHODS,
        "access-control-max-age": str(PREFLIGHT_SECS),
    }
    headers_wanted = request.headers.get("Access-Control-Request-Headers")
    if headers_wanted is not None:
        headers["access-control-allow-headers"] = headers_wanted
    return Response("OK", 200, headers, content_type="text/plain; charset=utf-8")


async def _add_headers(response: Response) -> Response:
    if response.status_code == 500 and response.mimetype == "text/plain":
        return response
    response.vary.add("Origin")
    origin = request.headers.get("Origin")
    if origin is not None:
        response.headers["access-control-allow-origin"] = origin
        response.headers["access-control-allow-credentials"] = "true"
    return response
