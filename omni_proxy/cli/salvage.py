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

from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import Config
from omni_proxy.config.source import decoded
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


def salvaged(raw: bytes, refusal: ConfigError) -> Config:
    """[server] and [admin], without the keys that are wrong. Raises the refusal."""
    try:
        text = decoded(raw, "")
    except ConfigError:
        raise refusal from None
    try:
        told: Mapping[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError):
        told = _line_by_line(text, refusal)
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
            table = header[1]
        elif key := _KEY.match(line):
            where, name = (key[1], key[2]) if not table else (table, key[2])
            if where not in TABLES or (table and key[1]):
                continue
            try:
                value = tomllib.loads(line[key.start(2) :])[name]
            except (ValueError, KeyError, RecursionError):
                if (where, name) in DECIDING:
                    raise refusal from None
            else:
                found[where][name] = value
    return found
