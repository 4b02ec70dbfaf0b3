"""JSON bodies into msgspec Structs, with every problem listed as FastAPI lists it.

Invariant: a value that fits the Struct is taken as it is; a value that means the same in another
type ("5" or 5.0 for 5) is converted; anything else is a 422 item `{type, loc, msg, input[, ctx]}`
(api-server.md 1.0). A body that is not JSON is refused before anything else is checked.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
from quart import request

from omni_proxy.replica.api.common.errors import InvalidBody
from omni_proxy.replica.api.common.lenient_decode import coerce, problem

S = TypeVar("S", bound=msgspec.Struct)


class _Missing:
    """No body at all, in contrast to every JSON value."""


MISSING = _Missing()


async def json_body() -> Any:
    """Return the request's JSON value, or MISSING if there is no body; the content type is ignored.

    Raises InvalidBody for bytes that are not JSON.
    """
    data = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    if not data:
        return MISSING
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidBody([_not_json(data)]) from None


def _not_json(data: bytes) -> dict[str, Any]:
    position, reason = 0, "No JSON value that can be read"
    try:
        json.loads(data)
    except json.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    except UnicodeDecodeError as error:
        position, reason = error.start, "Not UTF-8"
    except RecursionError:
        reason = "Nested too deeply"
    return {
        "type": "json_invalid",
        "loc": ["body", position],
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": reason},
    }


def validate(kind: type[S], body: object) -> S:
    """Return `body` as a `kind`. Raises InvalidBody with all problems."""
    if body is MISSING:
        raise InvalidBody([problem("missing", ("body",), "Field required", None)])
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError:
        coerced, problems = coerce(kind, body)
    if problems:
        raise InvalidBody(problems)
    return msgspec.convert(coerced, kind)


async def validate_body(kind: type[S]) -> S:
    return validate(kind, await json_body())


def value_error(message: str, given: object) -> InvalidBody:
    """The 422 of a body whose fields are valid one by one, but not together."""
    item = problem("value_error", ("body",), f"Value error, {message}", given)
    return InvalidBody([item | {"ctx": {"error": {}}}])
