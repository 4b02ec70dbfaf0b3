"""JSON in, JSON out: the one place where the front reads bodies and makes responses.

Invariant: every answer of the front is JSON, errors of Quart and Werkzeug included, but for the few
sentences of an older dialect and a browser's redirect from / to the dashboard; keys keep the order
in which they were said.
"""

from __future__ import annotations

import json

from quart import Quart, Response, g, has_request_context, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from omni_proxy.admin_api.near_paths import near_path
from omni_proxy.runtime_config.config_store import ChangeResult
from omni_proxy.wire.errors import HttpError, to_json

WARNING_FIELD = "X-Omni-Warning"


def reply(payload: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    warning = _warning()
    if warning and isinstance(payload, dict):
        payload = {**payload, "warning": warning}
    made = Response(to_json(payload), status, headers, content_type="application/json")
    return _warned(made, warning)


def text(sentence: str) -> Response:
    made = Response(sentence, 200, content_type="text/plain; charset=utf-8")
    return _warned(made, _warning())


def warn(warning: str) -> None:
    """The answer to the present request shall say so beside its success."""
    g.warning = warning


def _warning() -> str:
    return str(g.get("warning", "")) if has_request_context() else ""


def _warned(response: Response, warning: str) -> Response:
    if warning:
        response.headers[WARNING_FIELD] = warning.encode("ascii", "backslashreplace").decode()
    return response


def bad(message: str, code: str = "invalid_request") -> HttpError:
    return HttpError(400, message, code)


async def body_bytes() -> bytes:
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


async def json_object() -> dict[str, object]:
    """The request's body; an empty one is an empty object, the content type is not asked."""
    body = await body_bytes()
    try:
        value = json.loads(body) if body else {}
        if b"\\u" in body:  # half a character could be kept nowhere and told to nobody
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise bad("invalid JSON body", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad("request body must be a JSON object", "invalid_json")
    return value


def speak_json(app: Quart) -> None:
    """Give `app` our errors."""
    app.register_error_handler(HttpError, _refused)
    app.register_error_handler(HTTPException, _failed)


async def _refused(refusal: HttpError) -> Response:
    headers = dict(refusal.headers)
    return Response(refusal.body(), refusal.status, headers, content_type="application/json")


async def _failed(error: HTTPException) -> Response:
    status = error.code or 500
    if status == 404 and request.path == "/" and "text/html" in request.headers.get("Accept", ""):
        # A browser. Relative, for a proxy before us may have cut a prefix off.
        return Response("", 302, {"Location": "dashboard", "Cache-Control": "no-store"})
    code = error.name.lower().replace(" ", "_")
    message = f"{error.name}: {request.method} {_as_asked()}" if status < 500 else error.name
    if status == 404 and (near := near_path(_as_asked())):
        message += f"; did you mean {near}?"
    refusal = HttpError(status, message, code, detail=error.name)
    if isinstance(error, MethodNotAllowed):
        refusal.with_headers(("Allow", ", ".join(sorted(error.valid_methods or ()))))
    return await _refused(refusal)


def _as_asked() -> str:
    """The path as it came: what Quart makes of "//v1" or "%2f" looks like a path that is served."""
    return (request.scope.get("raw_path") or request.path.encode()).decode("latin-1")


# Revisions over HTTP: the ETag of answers, and what `If-Match` asks of a change.
#
# The keeper compares, under its lock; here the header is only carried and the mismatch told.


def etag(revision: int) -> dict[str, str]:
    return {"ETag": f'"{revision}"'}


def if_match() -> str | None:
    return request.headers.get("If-Match")


def refuse_mismatch(reloaded: ChangeResult) -> None:
    """Raises HttpError 412."""
    if reloaded.outcome == "precondition_failed":
        raise HttpError(
            412,
            f"the configuration is at revision {reloaded.revision}, which If-Match does not name",
            "precondition_failed",
        ).with_headers(*etag(reloaded.revision).items())
