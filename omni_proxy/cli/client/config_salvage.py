"""Reads [server] and [admin] from a configuration file that does not validate.

A proxy keeps running when its file is broken, and commands must still reach it. Invariant: keys
that determine where requests, and with them the admin key, are sent are never guessed: if such a
key is in the file and can't be read, the whole file is refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omni_proxy.config.parse import ConfigError, decode_text
from omni_proxy.config.schema import Config
from omni_proxy.config.validate import Finding, walk

TABLES: Final = ("server", "admin")
DECIDING: Final = frozenset(
    (
        ("server", "host"), ("server", "port"), ("server", "tls_cert"), ("server", "tls_key"),
        ("server", "tls_client_ca"), ("server", "tls_client_require"), ("admin", "listen"),
        ("server", "api_key"), ("admin", "api_key"),
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
        document: Mapping[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError):
        document = _line_by_line(text, refusal)
    if any(_is_misplaced(name, value) for name, value in document.items()):
        raise refusal
    valid: dict[str, dict[str, Any]] = {}
    for table in TABLES:
        keys = document.get(table, {})
        if not isinstance(keys, Mapping):
            raise refusal
        for key, value in keys.items():
            values, findings = walk({table: {key: value}}, Config)
            if not findings:
                valid.setdefault(table, {}).update(values[table])
            elif (table, key) in DECIDING or _may_be_meant(table, findings, keys):
                raise refusal
    return msgspec.convert(valid, Config)


def _is_misplaced(name: str, value: object) -> bool:
    """Whether a deciding key, perhaps meant for [server], is outside the known tables."""
    if name in Config.__struct_fields__:
        return False
    return name in _NAMES or (isinstance(value, Mapping) and not _NAMES.isdisjoint(value))


def _may_be_meant(table: str, findings: list[Finding], keys: Mapping[str, Any]) -> bool:
    """Whether an unknown key may be a misspelt deciding key, which is missing."""
    missing = [name for where, name in DECIDING if where == table and name not in keys]
    return any(f"`{name}`" in hint for _, _, hint in findings for name in missing)


def _line_by_line(text: str, refusal: ConfigError) -> dict[str, dict[str, Any]]:
    """Salvage a text that is not TOML: each line of the two tables that is valid on its own."""
    tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
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
            tables[where][name] = tomllib.loads(line[key.start(2) :])[name]
        except (ValueError, KeyError, RecursionError):
            if _may_decide(table, line):
                raise refusal from None
    return tables


def _may_decide(table: str, line: str) -> bool:
    """Whether an unreadable line may set a deciding key."""
    is_other_table = table not in TABLES and table.partition(".")[0] in Config.__struct_fields__
    return not is_other_table and _MENTION.search(line.partition("#")[0]) is not None
