"""Lenient decoding of JSON bodies into msgspec Structs, with problems reported as in FastAPI.

A value of the right type is used unchanged. A value of another type with the same meaning ("5" or
5.0 for 5) is converted. Any other value is a 422 item `{type, loc, msg, input[, ctx]}`
(note:api-server 1.0), with pydantic's types, locations and messages. Invariant: the list of
problems is empty if and only if the coerced value can be converted; it has all problems, up to
MAX_PROBLEMS. A body that is not JSON is refused before any field is checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import inspect
from quart import request

from omni_proxy.replica.api.common.errors import InvalidBody
from omni_proxy.shared.decoding import MALFORMED

Loc: TypeAlias = tuple[str | int, ...]
Problems: TypeAlias = list[dict[str, Any]]

# Without a bound, a body of many invalid elements would cause a response many times its size.
MAX_PROBLEMS = 100

_YES = frozenset(("1", "on", "t", "true", "y", "yes"))
_NO = frozenset(("0", "off", "f", "false", "n", "no"))
_INTEGER = re.compile(r"\s*[+-]?\d+(\.0+)?\s*", re.ASCII)
# Name of a bound in msgspec's type information -> pydantic's error type, its message, the check.
_BOUNDS: dict[str, tuple[str, str, Callable[[Any, Any], bool]]] = {
    "gt": ("greater_than", "greater than", lambda value, bound: value > bound),
    "ge": ("greater_than_equal", "greater than or equal to", lambda value, bound: value >= bound),
    "lt": ("less_than", "less than", lambda value, bound: value < bound),
    "le": ("less_than_equal", "less than or equal to", lambda value, bound: value <= bound),
}


def problem(kind: str, loc: Loc, message: str, value: object, **ctx: object) -> dict[str, Any]:
    item = {"type": kind, "loc": list(loc), "msg": message, "input": value}
    return item | {"ctx": ctx} if ctx else item


def coerce(kind: type[msgspec.Struct], body: object) -> tuple[object, Problems]:
    """Return the value with its types converted, and the problems found."""
    problems: Problems = []
    coerced = _walk(_type_of(kind), body, ("body",), problems)
    return coerced, problems[:MAX_PROBLEMS]


@cache
def _type_of(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _walk(kind: inspect.Type, value: object, loc: Loc, problems: Problems) -> Any:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    walker = _WALKERS.get(type(kind))
    if walker is None or len(problems) >= MAX_PROBLEMS:
        return value
    return walker(kind, value, loc, problems)


def _struct(kind: inspect.StructType, value: object, loc: Loc, problems: Problems) -> Any:
    if not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        problems.append(problem("model_attributes_type", loc, message, value))
        return value
    coerced = {}
    for field in kind.fields:
        name = field.encode_name
        if name in value:
            coerced[name] = _walk(field.type, value[name], (*loc, name), problems)
        elif field.required:
            problems.append(problem("missing", (*loc, name), "Field required", value))
    if kind.cls.__struct_config__.forbid_unknown_fields:
        names = {field.encode_name for field in kind.fields}
        for name in value.keys() - names:
            message = "Extra inputs are not permitted"
            problems.append(problem("extra_forbidden", (*loc, name), message, value[name]))
    return coerced


def _list(kind: inspect.ListType, value: object, loc: Loc, problems: Problems) -> Any:
    if not isinstance(value, list):
        problems.append(problem("list_type", loc, "Input should be a valid list", value))
        return value
    return [
        _walk(kind.item_type, element, (*loc, index), problems)
        for index, element in enumerate(value)
    ]


def _dict(kind: inspect.DictType, value: object, loc: Loc, problems: Problems) -> Any:
    if not isinstance(value, dict):
        problems.append(problem("dict_type", loc, "Input should be a valid dictionary", value))
        return value
    return {
        name: _walk(kind.value_type, element, (*loc, name), problems)
        for name, element in value.items()
    }


def _union(kind: inspect.UnionType, value: object, loc: Loc, problems: Problems) -> Any:
    """Use the first branch that accepts the value; if none does, list each branch's problems."""
    if value is None and any(
        isinstance(branch_type, inspect.NoneType) for branch_type in kind.types
    ):
        return None
    branches = [
        branch_type for branch_type in kind.types if not isinstance(branch_type, inspect.NoneType)
    ]
    if len(branches) == 1:
        return _walk(branches[0], value, loc, problems)
    all_problems: Problems = []
    for branch in branches:
        branch_problems: Problems = []
        coerced = _walk(branch, value, (*loc, _label(branch)), branch_problems)
        if not branch_problems:
            return coerced
        all_problems += branch_problems
    problems += all_problems
    return value


def _label(kind: inspect.Type) -> str:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.ListType):
        return f"list[{_label(kind.item_type)}]"
    if isinstance(kind, inspect.StructType):
        return kind.cls.__name__
    return _LABELS.get(type(kind), "any")


def _text(kind: inspect.StrType, value: object, loc: Loc, problems: Problems) -> Any:
    if not isinstance(value, str):
        problems.append(problem("string_type", loc, "Input should be a valid string", value))
    return value


def _boolean(kind: inspect.BoolType, value: object, loc: Loc, problems: Problems) -> Any:
    if isinstance(value, bool):
        return value
    message = "Input should be a valid boolean"
    if not isinstance(value, str | int | float) or (isinstance(value, float) and value % 1):
        problems.append(problem("bool_type", loc, message, value))
        return value
    # An integer may be too large for a float.
    word = value.lower() if isinstance(value, str) else str(int(value)) if value in (0, 1) else ""
    if word not in _YES | _NO:
        problems.append(
            problem("bool_parsing", loc, f"{message}, unable to interpret input", value)
        )
    return word in _YES


def _integer(kind: inspect.IntType, value: object, loc: Loc, problems: Problems) -> Any:
    message = "Input should be a valid integer"
    if isinstance(value, str):
        if not _INTEGER.fullmatch(value) or len(value) > 40:
            detail = f"{message}, unable to parse string as an integer"
            problems.append(problem("int_parsing", loc, detail, value))
            return value
        coerced = int(value.split(".")[0])
    elif isinstance(value, float) and not value.is_integer():
        detail = f"{message}, got a number with a fractional part"
        problems.append(problem("int_from_float", loc, detail, value))
        return value
    elif isinstance(value, int | float):
        coerced = int(value)
    else:
        problems.append(problem("int_type", loc, message, value))
        return value
    return _bounded(kind, coerced, value, (loc, problems))


def _number(kind: inspect.FloatType, value: object, loc: Loc, problems: Problems) -> Any:
    message = "Input should be a valid number"
    if not isinstance(value, str | int | float):
        problems.append(problem("float_type", loc, message, value))
        return value
    try:
        coerced = float(value)
    except (ValueError, OverflowError):
        detail = f"{message}, unable to parse string as a number"
        problems.append(problem("float_parsing", loc, detail, value))
        return value
    if not math.isfinite(coerced):
        problems.append(problem("finite_number", loc, "Input should be a finite number", value))
        return value
    return _bounded(kind, coerced, value, (loc, problems))


def _bounded(
    kind: inspect.IntType | inspect.FloatType,
    coerced: float,
    value: object,
    out: tuple[Loc, Problems],
) -> Any:
    loc, problems = out
    for name, (error_type, comparison, holds) in _BOUNDS.items():
        bound = getattr(kind, name)
        if bound is not None and not holds(coerced, bound):
            message = f"Input should be {comparison} {bound}"
            problems.append(problem(error_type, loc, message, value, **{name: bound}))
    return coerced


def _literal(kind: inspect.LiteralType, value: object, loc: Loc, problems: Problems) -> Any:
    if value not in kind.values:
        *others, last = [repr(choice) for choice in kind.values]
        expected = f"{', '.join(others)} or {last}" if others else last
        message = f"Input should be {expected}"
        problems.append(problem("literal_error", loc, message, value, expected=expected))
    return value


_WALKERS: dict[type, Callable[..., Any]] = {
    inspect.StructType: _struct,
    inspect.ListType: _list,
    inspect.DictType: _dict,
    inspect.UnionType: _union,
    inspect.StrType: _text,
    inspect.BoolType: _boolean,
    inspect.IntType: _integer,
    inspect.FloatType: _number,
    inspect.LiteralType: _literal,
}
_LABELS: dict[type, str] = {
    inspect.StrType: "str",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.DictType: "dict",
}


S = TypeVar("S", bound=msgspec.Struct)


class _Missing:
    """The type of MISSING: there is no body, which differs from every JSON value."""


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
    except MALFORMED:
        raise InvalidBody([_not_json(data)]) from None


def _not_json(data: bytes) -> dict[str, Any]:
    position, reason = 0, "Not a JSON value"
    try:
        json.loads(data)
    except json.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    except UnicodeDecodeError as error:
        position, reason = error.start, "Not UTF-8"
    except RecursionError:
        reason = "Nested too deeply"
    except ValueError:
        reason = "A number has too many digits"
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


def value_error(message: str, value: object) -> InvalidBody:
    """The 422 for a body whose fields are valid individually but not together."""
    item = problem("value_error", ("body",), f"Value error, {message}", value)
    return InvalidBody([item | {"ctx": {"error": {}}}])
