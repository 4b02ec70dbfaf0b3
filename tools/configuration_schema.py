"""omni_proxy/cli/config_file/schema.json: the JSON schema of the configuration file, for editors.

Invariant: generated from the same types and comments as docs/configuration.md, also by
`tools/configuration-page`; nothing about a single key is written here. The schema accepts every
file that the program accepts. It may accept more: it doesn't check rules between keys, host names,
or whether files exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
from msgspec import inspect as types

from omni_proxy.config import schema
from omni_proxy.config.fields import (
    POLICIES,
    read_endpoint,
    read_mode,
    read_optional_policy,
    read_policy,
    read_size,
)
from omni_proxy.config.tables.keys import read_key_sha256

Node = dict[str, Any]
TARGET: Final = Path(__file__).parent.parent / "omni_proxy" / "cli" / "config_file" / "schema.json"
DRAFT: Final = "http://json-schema.org/draft-07/schema#"  # supported by all editor plug-ins
_OWN_POLICY: Final[Node] = {"type": "string", "minLength": 1}
# Schemas of values with a special syntax, instead of those of their types.
SPELLED: Final[dict[object, Node]] = {
    read_size: {
        "anyOf": [
            {"type": "integer", "minimum": 1},
            {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)? ?([kKmMgG]?[iI]?[bB]?)\s*$"},
        ]
    },
    read_endpoint: {"type": "string", "pattern": r"^/[^?#\s]*$"},
    read_mode: {"type": "string", "pattern": "^0?[0-7]{3}$"},
    read_policy: {"anyOf": [{"enum": list(POLICIES)}, _OWN_POLICY]},
    read_optional_policy: {"anyOf": [{"enum": ["", *POLICIES]}, _OWN_POLICY]},
    read_key_sha256: {"type": "string", "pattern": r"^\s*([0-9a-fA-F]{64})?\s*$"},
}

Meaning = Callable[[str, type, str], str]  # a key's meaning, by dotted table, struct, name


def text(meaning: Meaning) -> str:
    """The complete text of the file."""
    root = {
        "$schema": DRAFT,
        "title": "The configuration file of omni-proxy",
        **_struct(schema.Config, "", meaning),
    }
    return json.dumps(root, indent=2, ensure_ascii=False) + "\n"


def _struct(struct: type, path: str, meaning: Meaning) -> Node:
    hints = get_type_hints(struct)
    properties: Node = {}
    required = []
    for field in types.type_info(struct).fields:  # type: ignore[attr-defined]
        dotted = f"{path}.{field.name}" if path else field.name
        node = _node(field.type, hints[field.name], dotted, meaning)
        if described := meaning(path, struct, field.name):
            node["description"] = described
        default = _default(field)
        if default is msgspec.NODEFAULT:
            required.append(field.name)
        elif not isinstance(default, msgspec.Struct):
            node["default"] = msgspec.to_builtins(default)
        properties[field.name] = node
    node = {"type": "object", "additionalProperties": False, "properties": properties}
    if struct.__dict__.get("__doc__"):
        node["description"] = " ".join(str(struct.__doc__).split())
    return {**node, "required": required} if required else node


def _default(field: types.Field) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _node(kind: types.Type, hint: object, path: str, meaning: Meaning) -> Node:
    match kind:
        case types.Metadata():
            reader = (kind.extra or {}).get("read")
            return (
                dict(SPELLED[reader])
                if reader in SPELLED
                else _node(kind.type, hint, path, meaning)
            )
        case types.StructType(cls=struct):
            return _struct(struct, path, meaning)
        case types.UnionType(types=parts):
            return {"anyOf": [_node(part, None, path, meaning) for part in parts]}
        case types.VarTupleType(item_type=item, min_length=least):
            node: Node = {"type": "array", "items": _node(item, None, path, meaning)}
            return {**node, "minItems": least} if least else node
        case types.DictType(value_type=values):
            return {"type": "object", "additionalProperties": _node(values, None, path, meaning)}
        case types.LiteralType(values=values):
            # Keep the order of the schema: the type library sorts them.
            ordered = get_args(hint)
            return {"enum": list(ordered if set(ordered) == set(values) else values)}
        case types.BoolType():
            return {"type": "boolean"}
        case types.StrType():
            return {"type": "string"} | ({"minLength": 1} if kind.min_length else {})
        case types.IntType() | types.FloatType():
            name = "integer" if isinstance(kind, types.IntType) else "number"
            return {"type": name, **dict(_range(kind))}
    raise TypeError(f"{path}: say here what {kind} takes")


def _range(kind: types.IntType | types.FloatType) -> Iterator[tuple[str, float]]:
    for word, bound in (
        ("minimum", kind.ge), ("exclusiveMinimum", kind.gt), ("maximum", kind.le),
    ):  # fmt: skip
        if bound is not None:
            yield word, bound
