"""The difference of two configurations, and a configuration with its secrets redacted.

Both results are JSON-serializable and contain no secrets: keys, tokens and passwords are replaced
by "***", also in the environments and commands of launched replicas.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from omni_proxy.config.schema import Config
from omni_proxy.config.tables.cluster import hide_password

_HIDDEN: Final = "***"
_SECRET: Final = re.compile(r"(?:key|token|secret|password)$", re.IGNORECASE)
# Lists of tables, and the key that identifies their entries.
_LISTS: Final = {
    "workers": "url", "launch": "name", "routes": "path", "control_routes": "path", "keys": "name",
    "discover": "name",
}  # fmt: skip


def redacted(config: Config) -> dict[str, Any]:
    """The tables as in FILE, with every key present."""
    tables = _tables(config)
    for table in ("server", "admin"):
        tables[table]["api_key"] = _hidden(tables[table]["api_key"])
    tables["cluster"]["url"] = hide_password(tables["cluster"]["url"])
    for entry in (*tables["admin"]["keys"], *tables["keys"]):
        entry["key_sha256"] = _hidden(entry["key_sha256"])
    for entry in tables["workers"]:
        entry["role"] = entry["role"] or "regular"
    for entry in tables["launch"]:
        entry["env"] = {k: _hidden(v) if _SECRET.search(k) else v for k, v in entry["env"].items()}
        entry["command"] = list(_without_secrets(entry["command"]))
    return tables


def diff(old: Config, new: Config) -> dict[str, Any]:
    """Old and new value of each key that changed; entries of lists are matched by name or URL."""
    real, shown_values = (_tables(old), _tables(new)), (redacted(old), redacted(new))
    changes: dict[str, Any] = {"changed": _changed(*map(_flat, real), *map(_flat, shown_values))}
    for table, name in _LISTS.items():
        before, after, shown_before, shown_after = (
            {entry[name]: entry for entry in tables[table]} for tables in (*real, *shown_values)
        )
        changes[table] = {
            "added": [key for key in after if key not in before],
            "removed": [key for key in before if key not in after],
            "changed": {
                key: _changed(before[key], after[key], shown_before[key], shown_after[key])
                for key in after
                if key in before and before[key] != after[key]
            },
        }
    return changes


def _changed(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    shown_old: Mapping[str, Any],
    shown_new: Mapping[str, Any],
) -> dict[str, list[Any]]:
    return {key: [shown_old[key], shown_new[key]] for key in new if old[key] != new[key]}


def _tables(config: Config) -> dict[str, Any]:
    tables: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return tables


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if prefix + key in _LISTS:
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _without_secrets(command: list[str]) -> Iterator[str]:
    """The arguments, with X redacted in `--api-key X` and `--api-key=X`."""
    secret_next = False
    for arg in command:
        flag, equals, value = arg.partition("=")
        is_secret_flag = flag.startswith("-") and _SECRET.search(flag) is not None
        if secret_next and not arg.startswith("-"):
            yield _hidden(arg)
        elif is_secret_flag and equals:
            yield f"{flag}={_hidden(value)}"
        else:
            yield arg
        secret_next = is_secret_flag and not equals


def _hidden(secret: str) -> str:
    return _HIDDEN if secret else ""
