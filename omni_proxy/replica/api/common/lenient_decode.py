"""Walks a value beside a Struct's type: mends what means the same, lists what does not fit. Pure.

Invariant: the list is empty exactly if the mended value can be converted; problems are found up to
MAX_PROBLEMS, not the first alone. Kinds, places and words are those that pydantic's clients know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect

Loc: TypeAlias = tuple[str | int, ...]
Problems: TypeAlias = list[dict[str, Any]]

# A body of a million wrong elements would be answered by a hundred times its bytes.
MAX_PROBLEMS = 100

_YES = frozenset(("1", "on", "t", "true", "y", "yes"))
_NO = frozenset(("0", "off", "f", "false", "n", "no"))
_INTEGER = re.compile(r"\s*[+-]?\d+(\.0+)?\s*", re.ASCII)
# Attribute of msgspec's type information -> what pydantic calls a value beyond it, and its words.
_BOUNDS: dict[str, tuple[str, str, Callable[[Any, Any], bool]]] = {
    "gt": ("greater_than", "greater than", lambda value, bound: value > bound),
    "ge": ("greater_than_equal", "greater than or equal to", lambda value, bound: value >= bound),
    "lt": ("less_than", "less than", lambda value, bound: value < bound),
    "le": ("less_than_equal", "less than or equal to", lambda value, bound: value <= bound),
}


def problem(kind: str, loc: Loc, message: str, given: object, **ctx: object) -> dict[str, Any]:
    item = {"type": kind, "loc": list(loc), "msg": message, "input": given}
    return item | {"ctx": ctx} if ctx else item


def coerce(kind: type[msgspec.Struct], body: object) -> tuple[object, Problems]:
    """The value with its types set right, and what could not be set right."""
    problems: Problems = []
    mended = _walk(_type_of(kind), body, ("body",), problems)
    return mended, problems[:MAX_PROBLEMS]


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
        told = "Input should be a valid dictionary or object to extract fields from"
        problems.append(problem("model_attributes_type", loc, told, value))
        return value
    mended = {}
    for field in kind.fields:
        name = field.encode_name
        if name in value:
            mended[name] = _walk(field.type, value[name], (*loc, name), problems)
        elif field.required:
            problems.append(problem("missing", (*loc, name), "Field required", value))
    if kind.cls.__struct_config__.forbid_unknown_fields:
        known = {field.encode_name for field in kind.fields}
        for name in value.keys() - known:
            told = "Extra inputs are not permitted"
            problems.append(problem("extra_forbidden", (*loc, name), told, value[name]))
    return mended


def _list(kind: inspect.ListType, value: object, loc: Loc, problems: Problems) -> Any:
    if not isinstance(value, list):
        problems.append(problem("list_type", loc, "Input should be a valid list", value))
        return value
    return [_walk(kind.item_type, each, (*loc, at), problems) for at, each in enumerate(value)]


def _dict(kind: inspect.DictType, value: object, loc: Loc, problems: Problems) -> Any:
    if not isinstance(value, dict):
        problems.append(problem("dict_type", loc, "Input should be a valid dictionary", value))
        return value
    return {
        name: _walk(kind.value_type, each, (*loc, name), problems) for name, each in value.items()
    }


def _union(kind: inspect.UnionType, value: object, loc: Loc, problems: Problems) -> Any:
    """The first branch that takes the value; of several real branches each tells why not."""
    if value is None and any(isinstance(each, inspect.NoneType) for each in kind.types):
        return None
    branches = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
    if len(branches) == 1:
        return _walk(branches[0], value, loc, problems)
    found: Problems = []
    for branch in branches:
        tried: Problems = []
        mended = _walk(branch, value, (*loc, _label(branch)), tried)
        if not tried:
            return mended
        found += tried
    problems += found
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
    told = "Input should be a valid boolean"
    if not isinstance(value, str | int | float) or (isinstance(value, float) and value % 1):
        problems.append(problem("bool_type", loc, told, value))
        return value
    word = value.lower() if isinstance(value, str) else f"{value:g}"
    if word not in _YES | _NO:
        problems.append(problem("bool_parsing", loc, f"{told}, unable to interpret input", value))
    return word in _YES


def _integer(kind: inspect.IntType, value: object, loc: Loc, problems: Problems) -> Any:
    told = "Input should be a valid integer"
    if isinstance(value, str):
        if not _INTEGER.fullmatch(value) or len(value) > 40:
            more = f"{told}, unable to parse string as an integer"
            problems.append(problem("int_parsing", loc, more, value))
            return value
        mended = int(value.split(".")[0])
    elif isinstance(value, float) and not value.is_integer():
        more = f"{told}, got a number with a fractional part"
        problems.append(problem("int_from_float", loc, more, value))
        return value
    elif isinstance(value, int | float):
        mended = int(value)
    else:
        problems.append(problem("int_type", loc, told, value))
        return value
    return _bounded(kind, mended, value, (loc, problems))


def _number(kind: inspect.FloatType, value: object, loc: Loc, problems: Problems) -> Any:
    told = "Input should be a valid number"
    if not isinstance(value, str | int | float):
        problems.append(problem("float_type", loc, told, value))
        return value
    try:
        mended = float(value)
    except (ValueError, OverflowError):
        more = f"{told}, unable to parse string as a number"
        problems.append(problem("float_parsing", loc, more, value))
        return value
    if not math.isfinite(mended):
        problems.append(problem("finite_number", loc, "Input should be a finite number", value))
        return value
    return _bounded(kind, mended, value, (loc, problems))


def _bounded(
    kind: inspect.IntType | inspect.FloatType,
    mended: float,
    given: object,
    out: tuple[Loc, Problems],
) -> Any:
    loc, problems = out
    for name, (told, words, holds) in _BOUNDS.items():
        bound = getattr(kind, name)
        if bound is not None and not holds(mended, bound):
            message = f"Input should be {words} {bound}"
            problems.append(problem(told, loc, message, given, **{name: bound}))
    return mended


def _literal(kind: inspect.LiteralType, value: object, loc: Loc, problems: Problems) -> Any:
    if value not in kind.values:
        *most, last = [repr(each) for each in kind.values]
        expected = f"{', '.join(most)} or {last}" if most else last
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
