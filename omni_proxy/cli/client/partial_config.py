"""What a refused configuration file still says of where its proxy is, and which key that takes.

A proxy that runs goes on when its file is broken, and is to be found just then. Invariant: a key
that decides where a request, and with it the admin key, goes to is never guessed: where it stands
in the file and can't be read, the whole file is refused. PURE.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omni_proxy.config.parse import ConfigError, decode_text
from omni_proxy.config.schema import Config
from omni_proxy.config.walk import Finding, walk

TABLES: Final = ("server", "admin")
DECIDING: Final = frozenset(
    (
        ("server", "host"), ("server", "port"), ("server", "tls_cert"), ("server", "tls_key"),
        ("server", "tls_client_ca"), ("server", "tls_client_require"), ("admin", "listen"),
        ("admin", "api_key"),
    )
)  # fmt: skip
_HEADER: Final = re.compile(r"\s*\[+\s*([^]#]*?)\s*\]+\s*(?:#.*)?$")
_KEY: Final = re.compile(r"\s*(?:(\w+)\s*\.\s*)?(\w+)\s*=")
_NAMES: Final = frozenset(name for _, name in DECIDING)
_MENTION: Final = re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(_NAMES))})[\"']?\s*(?:=|$)")


def salvage_config(raw: bytes, refusal: ConfigError) -> Config:
    """[server] and [admin], without the keys that are wrong. Raises the refusal."""
    try:
        text = decode_text(raw, "")
    except ConfigError:
        raise refusal from None
    try:
        told: Mapping[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError):
        told = _line_by_line(text, refusal)
    if any(_is_misplaced(name, value) for name, value in told.items()):
        raise refusal
    kept: dict[str, dict[str, Any]] = {}
    for table in TABLES:
        keys = told.get(table, {})
        if not isinstance(keys, Mapping):
            raise refusal
        for key, value in keys.items():
            seen, findings = walk({table: {key: value}}, Config)
            if not findings:
                kept.setdefault(table, {}).update(seen[table])
            elif (table, key) in DECIDING or _may_be_meant(table, findings, keys):
                raise refusal
    return msgspec.convert(kept, Config)


def _is_misplaced(name: str, value: object) -> bool:
    """Whether it holds a deciding key and is no table of ours: one that was meant for [server]?"""
    if name in Config.__struct_fields__:
        return False
    return name in _NAMES or (isinstance(value, Mapping) and not _NAMES.isdisjoint(value))


def _may_be_meant(table: str, findings: list[Finding], keys: Mapping[str, Any]) -> bool:
    """Whether an unknown key is a slip for a deciding one, which is missing."""
    missing = [name for where, name in DECIDING if where == table and name not in keys]
    return any(f"`{name}`" in hint for _, _, hint in findings for name in missing)


def _line_by_line(text: str, refusal: ConfigError) -> dict[str, dict[str, Any]]:
    """Of a text that is no TOML: each line of the two tables that is some for itself."""
    found: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    table = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            table = header[1].strip("\"'")
            continue
        if line.lstrip().startswith("["):
            table = ""  # a header that can't be read
        key = _KEY.match(line)
        where, name = (table or key[1], key[2]) if key and not (table and key[1]) else ("", "")
        try:
            if where not in TABLES or key is None:
                raise ValueError
            found[where][name] = tomllib.loads(line[key.start(2) :])[name]
        except (ValueError, KeyError, RecursionError):
            if _may_decide(table, line):
                raise refusal from None
    return found


def _may_decide(table: str, line: str) -> bool:
    """Whether a line that says nothing readable may be meant for a deciding key."""
    other = table not in TABLES and table.partition(".")[0] in Config.__struct_fields__
    return not other and _MENTION.search(line.partition("#")[0]) is not None
