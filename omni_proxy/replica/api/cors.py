"""Cross-origin requests: any page may call, with any method and header (api-server.md 1.0).

Invariant: every answer varies by origin, save the 500 of an error that nobody foresaw.
"""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
PREFLIGHT_SECS = 600


def open_to_all(app: QuartTrio) -> None:
    app.before_request(_preflight)
    app.after_request(_allowed)


async def _preflight() -> Response | None:
    wanted = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or "Origin" not in request.headers or wanted is None:
        return None
    headers = {
        "access-control-allow-methods": METHODS,
        "access-control-max-age": str(PREFLIGHT_SECS),
    }
    asked = request.headers.get("Access-Control-Request-Headers")
    if asked is not None:
        headers["access-control-allow-headers"] = asked
    return Response("OK", 200, headers, content_type="text/plain; charset=utf-8")


async def _allowed(response: Response) -> Response:
    if response.status_code == 500 and response.mimetype == "text/plain":
        return response
    response.vary.add("Origin")
    origin = request.headers.get("Origin")
    if origin is not None:
        response.headers["access-control-allow-origin"] = origin
        response.headers["access-control-allow-credentials"] = "true"
    return response
