"""JSON requests and responses: the only module that reads bodies and makes responses; and bodies
that are sent for a long time, with the bound on their number.

Invariant: every response of the admin API is JSON, errors of Quart and Werkzeug included, except
streams, metrics, a few texts of an older dialect and the redirect of a browser from / to the
dashboard; keys keep their order. A 404 suggests the closest served path; only paths of bounded
length are compared, so that a flood of unknown paths is cheap.
"""

from __future__ import annotations

import difflib
import json
from abc import abstractmethod
from types import TracebackType
from typing import Final, Self

from quart import Quart, Response, g, has_request_context, request
from quart.wrappers.response import ResponseBody
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from omni_proxy.admin_ops.admin_route_table import paths
from omni_proxy.routing.routes import MODEL_PATHS
from omni_proxy.runtime_config.config_store import ChangeResult
from omni_proxy.wire.errors import HttpError, bad_request, to_json

WARNING_FIELD = "X-Omni-Warning"
_FLAG_WORDS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("", "false", "0", "no", "off"), False),
}


def json_response(
    payload: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    warning = _warning()
    if warning and isinstance(payload, dict):
        payload = {**payload, "warning": warning}
    response = Response(to_json(payload), status, headers, content_type="application/json")
    return _warned(response, warning)


def text_response(sentence: str) -> Response:
    response = Response(sentence, 200, content_type="text/plain; charset=utf-8")
    return _warned(response, _warning())


def warn(warning: str) -> None:
    """Add a warning to the response of the current request."""
    g.warning = warning


def _warning() -> str:
    return str(g.get("warning", "")) if has_request_context() else ""


def _warned(response: Response, warning: str) -> Response:
    if warning:
        response.headers[WARNING_FIELD] = warning.encode("ascii", "backslashreplace").decode()
    return response


RETRY = b"retry: 2000\n"  # ms until a disconnected browser reconnects


class ReaderLimit:
    """Counts the readers and bounds their number."""

    def __init__(self, limit: int, code: str) -> None:
        self.count = 0
        self._limit = limit
        self._code = code

    def check_limit(self) -> None:
        if self.count >= self._limit:
            message = f"{self.count} readers are served already"
            refusal = HttpError(503, message, self._code)
            raise refusal.with_headers(("retry-after", "2"))


class Body(ResponseBody):
    """A body that counts as a reader while it is sent.

    Not a generator: an abandoned generator is closed at an undefined time.
    """

    def __init__(self, readers: ReaderLimit) -> None:
        self._readers = readers

    async def __aenter__(self) -> Self:
        self._readers.count += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._readers.count -= 1

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes: ...


async def body_bytes() -> bytes:
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


def query_flag(name: str) -> bool:
    """A boolean of the query; without it false. Raises HttpError 400 for any other value.

    Engines' routes follow the engines: their clients may send other words.
    """
    value = request.args.get(name, "").lower()
    if value not in _FLAG_WORDS:
        raise bad_request(f"{name} must be true or false")
    return _FLAG_WORDS[value]


async def json_object() -> dict[str, object]:
    """The body of the request; an empty one is an empty object, the content type does not matter.

    Raises HttpError 400.
    """
    body = await body_bytes()
    try:
        value = json.loads(body) if body else {}
        if b"\\u" in body:  # a lone surrogate could not be saved or sent
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise bad_request("invalid JSON body", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("request body must be a JSON object", "invalid_json")
    return value


def add_json_errors(app: Quart) -> None:
    """Make all errors of `app` JSON."""
    app.register_error_handler(HttpError, _refused)
    app.register_error_handler(HTTPException, _failed)


async def _refused(refusal: HttpError) -> Response:
    headers = dict(refusal.headers)
    return Response(refusal.body(), refusal.status, headers, content_type="application/json")


async def _failed(error: HTTPException) -> Response:
    status = error.code or 500
    if status == 404 and request.path == "/" and request.method == "HEAD":
        return Response("", 200)  # clients of the Messages API probe a server this way
    if status == 404 and request.path == "/" and "text/html" in request.headers.get("Accept", ""):
        # A browser. The location is relative: a proxy in front may have stripped a prefix.
        return Response("", 302, {"Location": "dashboard", "Cache-Control": "no-store"})
    code = error.name.lower().replace(" ", "_")
    message = f"{error.name}: {request.method} {_raw_path()}" if status < 500 else error.name
    if status == 404 and (near := closest_path(_raw_path())):
        message += f"; did you mean {near}?"
    refusal = HttpError(status, message, code, detail=error.name)
    if isinstance(error, MethodNotAllowed):
        refusal.with_headers(("Allow", ", ".join(sorted(error.valid_methods or ()))))
    return await _refused(refusal)


def _raw_path() -> str:
    """The path as received. Quart's decoded path of "//v1" or "%2f" may look like a served one."""
    return (request.scope.get("raw_path") or request.path.encode()).decode("latin-1")


# Revisions: the ETag of responses and `If-Match` of changes. The configuration store compares
# them, under its lock.


def etag(revision: int) -> dict[str, str]:
    return {"ETag": f'"{revision}"'}


def if_match() -> str | None:
    return request.headers.get("If-Match")


def raise_on_mismatch(reloaded: ChangeResult) -> None:
    """Raises HttpError 412."""
    if reloaded.outcome == "precondition_failed":
        raise HttpError(
            412,
            f"the configuration is at revision {reloaded.revision}, which If-Match does not name",
            "precondition_failed",
        ).with_headers(*etag(reloaded.revision).items())


MAX_PATH_CHARS: Final = 64  # a little more than the longest served path
CUTOFF: Final = 0.8  # share of common letters
_KNOWN: Final = sorted({*MODEL_PATHS, *paths()})


def closest_path(path: str) -> str:
    """The served path that is most like `path`; "" if none is close."""
    if len(path) > MAX_PATH_CHARS:
        return ""
    close = difflib.get_close_matches(path, _KNOWN, n=1, cutoff=CUTOFF)
    return close[0] if close and close[0] != path else ""
