"""The three error formats of the routes: `{"detail"}`, OpenAI's and the speech routes'.

`DetailError`, `OpenAIError` and `SpeechError` determine the format; an error of the pipeline client
becomes `{"detail"}`. A `SpeechError` has four keys that are always present (note:api-server 1.0); a
client error names the field at fault, a server error names none. Invariant: an unexpected error is
a plain-text 500 without details.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from quart import Response
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge

from omni_proxy.replica.pipeline.requests import QueueFullError, RequestFailed

# The exceptions that methods of a pipeline client raise, besides cancellation.
CLIENT_ERRORS = (QueueFullError, RequestFailed)
ClientError: TypeAlias = QueueFullError | RequestFailed


class DetailError(Exception):
    """Answers the request with `status` and `{"detail": detail}`."""

    def __init__(self, status: int, detail: object, headers: Mapping[str, str] = {}) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers

    def response(self) -> Response:
        return json_response({"detail": self.detail}, self.status, self.headers)


class InvalidBody(DetailError):
    """The body does not match the route's schema: 422 with one item per problem."""

    def __init__(self, problems: list[dict[str, Any]]) -> None:
        super().__init__(422, problems)
        self.problems = problems


class OpenAIError(Exception):
    """Answers the request with `status` and OpenAI's error object, with all keys."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def error(self) -> dict[str, Any]:
        return {
            "message": self.message,
            "type": error_type(self.status),
            "param": self.param,
            "code": self.code,
        }

    def response(self) -> Response:
        return json_response({"error": self.error()}, self.status)


def json_response(payload: object, status: int = 200, headers: Mapping[str, str] = {}) -> Response:
    """A compact JSON response, keys in the order of `payload`."""
    body = msgspec.json.encode(payload)
    return Response(body, status, dict(headers), content_type="application/json")


def empty_response() -> Response:
    """200 without a body."""
    return Response(b"", 200, content_type="text/plain; charset=utf-8")


def error_type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def error_message(detail: Any) -> str:
    """The text of an error's `detail`: a string, an aggregate, or a list of problems."""
    if isinstance(detail, dict):
        return str(detail["message"])
    if isinstance(detail, list):
        return "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in detail
        )
    return str(detail)


def status_and_message(error: ClientError) -> tuple[int, str]:
    """The HTTP status and the message for an error of the pipeline client (note:api-server 1.3)."""
    if isinstance(error, QueueFullError):
        return 503, str(error)
    return error.status, error.message


def to_openai_error(error: DetailError | ClientError) -> OpenAIError:
    """Convert an error to OpenAI's format; a 422 becomes a 400."""
    if isinstance(error, InvalidBody):
        first = error.problems[0]
        path = [str(step) for step in first["loc"][1:]]
        name = ".".join(path) or "the body"
        return OpenAIError(400, f"{name}: {first['msg']}", path[0] if path else None)
    if isinstance(error, DetailError):
        return OpenAIError(error.status, str(error.detail))
    return OpenAIError(*status_and_message(error))


def register_error_handlers(app: QuartTrio) -> None:
    """Register the handlers of these errors, and of Quart's own, with `app`."""
    app.register_error_handler(DetailError, _response_of)
    app.register_error_handler(OpenAIError, _response_of)
    app.register_error_handler(SpeechError, _response_of)
    for kind in CLIENT_ERRORS:
        app.register_error_handler(kind, _client_failed)
    app.register_error_handler(HTTPException, _http_failed)


async def _response_of(error: DetailError | OpenAIError | SpeechError) -> Response:
    return error.response()


async def _client_failed(error: ClientError) -> Response:
    status, message = status_and_message(error)
    return DetailError(status, message).response()


async def _http_failed(error: HTTPException) -> Response:
    """Answer Quart's own errors; unexpected exceptions arrive here as InternalServerError."""
    status = error.code or 500
    if status >= 500:
        return Response("Internal Server Error", status, content_type="text/plain; charset=utf-8")
    headers = {}
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(sorted(error.valid_methods or ()))
    detail: str = error.name
    if isinstance(error, RequestEntityTooLarge):
        detail = "Request body too large"
    return DetailError(status, detail, headers).response()


@dataclass(slots=True)
class SpeechError(Exception):
    """Ends a speech request with an error, before any audio or within a session."""

    message: str
    param: str | None = None
    status: int = 400
    kind: str = "BadRequestError"
    code: int | str | None = 400

    def error(self) -> dict[str, Any]:
        """Return the value of the key "error"."""
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }

    def under(self, path: str) -> SpeechError:
        """Return the same error with `path` prefixed to its field's name."""
        param = f"{path}.{self.param}" if self.param else path
        return SpeechError(self.message, param, self.status, self.kind, self.code)

    def response(self) -> Response:
        """Return the HTTP response."""
        body = msgspec.json.encode({"error": self.error()})
        return Response(body, self.status, content_type="application/json")


def speech_server_error(message: str, status: int = 500) -> SpeechError:
    """Return an error that is not the caller's fault: type server_error, no code."""
    return SpeechError(message, None, status, "server_error", None)


def upload_too_large(message: str, param: str) -> SpeechError:
    """Return the 413 of an upload above its limit."""
    return SpeechError(message, param, 413, "RequestTooLargeError", 413)


def speech_error_for_status(message: str, status: int) -> SpeechError:
    """Return the error for a request that failed in the pipeline with that status."""
    return SpeechError(message) if status < 500 else speech_server_error(message, status)
