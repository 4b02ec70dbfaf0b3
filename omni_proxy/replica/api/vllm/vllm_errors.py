"""vLLM's error format: `{"error": {message, type, param, code}}`, where `code` is the HTTP status.

`vllm_view` wraps a route and converts its errors to this format. The message for an invalid body
is that of FastAPI's validation as vLLM prints it: one line for each problem.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from http import HTTPStatus
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from quart import Response, request

from omni_proxy.replica.api.common.errors import (
    CLIENT_ERRORS,
    ClientError,
    DetailError,
    InvalidBody,
    OpenAIError,
    error_message,
    json_response,
    status_and_message,
)
from omni_proxy.replica.api.common.lenient_decode import MISSING, problem, validate

P = ParamSpec("P")
S = TypeVar("S", bound=msgspec.Struct)

MAX_PROBLEMS_SHOWN: Final = 10
MAX_INPUT_CHARS: Final = 200
TYPES: Final[Mapping[int, str]] = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class VllmError(Exception):
    """Answers the request with `status` and this error; `kind` None is the status's kind."""

    def __init__(
        self, status: int, message: str, *, kind: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind if kind is not None else error_kind(status)
        self.param = param

    def body(self) -> dict[str, Any]:
        """The body of the response, and the payload of an event once a stream has begun."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.status,
            }
        }


def error_kind(status: int) -> str:
    return TYPES.get(status) or HTTPStatus(status).phrase


def http_reason(status: int) -> str:
    """The type of errors of vLLM's web framework, in contrast to its engine."""
    return HTTPStatus(status).phrase


def worker_error(message: str) -> VllmError:
    """The error of a call that failed in a worker of the engine."""
    text = f"Call to collective_rpc method failed: Worker failed with error '{message}'"
    return VllmError(500, f"{text}, please check the stack trace above for the root cause")


def to_vllm_error(error: DetailError | OpenAIError | ClientError | VllmError) -> VllmError:
    if isinstance(error, VllmError):
        return error
    if isinstance(error, InvalidBody):
        return validation_error(error.problems)
    if isinstance(error, DetailError):
        return VllmError(error.status, error_message(error.detail), kind=_kind_of(error.status))
    if isinstance(error, OpenAIError):
        return VllmError(error.status, error.message, param=error.param)
    status, message = status_and_message(error)
    return VllmError(status, message)


def _kind_of(status: int) -> str:
    return http_reason(status) if status in (401, 403, 413) else error_kind(status)


def validation_error(problems: list[dict[str, Any]]) -> VllmError:
    """The 400 for a body or a query whose fields are invalid."""
    count = len(problems)
    label = "error" if count == 1 else "errors"
    lines = [f"  {_describe(item)}" for item in problems[:MAX_PROBLEMS_SHOWN]]
    if count > len(lines):
        lines.append(f"  ...and {count - len(lines)} more {label}")
    message = "\n".join([f"{count} validation {label}:", *lines])
    return VllmError(400, message, kind=http_reason(400), param=_path(problems[0]))


def _describe(item: Mapping[str, Any]) -> str:
    return str({**item, "loc": _path(item), "input": _summary(item.get("input"))})


def _path(item: Mapping[str, Any]) -> str:
    return ".".join(str(step) for step in item["loc"])


def _summary(value: object) -> str:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= MAX_INPUT_CHARS else f"{text[:MAX_INPUT_CHARS]}...[truncated]"


def decode_control_body(kind: type[S], body: object) -> S:
    """The fields of a body for vLLM's control routes; a missing body counts as an empty one."""
    try:
        return validate(kind, {} if body is MISSING else body)
    except InvalidBody as error:
        raise validation_error(
            [
                {**item, "input": None} if item["type"] == "missing" else item
                for item in error.problems
            ]
        ) from None


def query_choice(name: str, choices: tuple[str, ...], default: str) -> str:
    """The query parameter `name`, one of `choices`; raises VllmError for any other value."""
    value = request.args.get(name, default)
    if value in choices:
        return value
    *most, last = (f"'{choice}'" for choice in choices)
    expected = f"{', '.join(most)} or {last}"
    item = problem(
        "literal_error", ("query", name), f"Input should be {expected}", value, expected=expected
    )
    raise validation_error([item])


def query_flag(name: str, *, default: bool) -> bool:
    value = request.args.get(name)
    if value is None:
        return default
    word = value.lower()
    if word in ("true", "1", "yes", "on", "t", "y"):
        return True
    if word in ("false", "0", "no", "off", "f", "n"):
        return False
    text = "Input should be a valid boolean, unable to interpret input"
    raise validation_error([problem("bool_parsing", ("query", name), text, value)])


def vllm_view(view: Callable[P, Awaitable[Response]]) -> Callable[P, Awaitable[Response]]:
    """Wrap a route so that its errors have vLLM's format."""

    @wraps(view)
    async def wrapped_view(*args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            return await view(*args, **kwargs)
        except (DetailError, OpenAIError, VllmError, *CLIENT_ERRORS) as error:
            response = to_vllm_error(error)
            headers = error.headers if isinstance(error, DetailError) else {}
            return json_response(response.body(), response.status, headers)

    return wrapped_view
