"""`[[keys]]`, and the sources of API keys that it has in common with `[[admin.keys]]`.

Invariant: the configuration file never contains a key itself, and errors never repeat a value that
might be one. Values only; `api_keys.key_table` reads the sources.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from omni_proxy.config.problem import Path, format_path
from omni_proxy.wire.bounded_json import MAX_INTEGER

SOURCES: Final = ("key_env", "key_file", "key_sha256")
MAX_NAME: Final = 64
MAX_KEYS: Final = 4096  # of one list
_NAME: Final = re.compile(rf"[A-Za-z0-9_.:@/-]{{1,{MAX_NAME}}}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
# Likely names under which users write the key itself into the file.
_KEY_ITSELF: Final = frozenset(("key", "api_key", "apikey", "token", "secret", "value", "password"))


def read_key_name(value: object) -> object:
    """The name appears in log lines, metric labels and a table: no spaces, no quotes."""
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ValueError(f"takes 1 to {MAX_NAME} letters, digits and _ . : @ / -")
    return value


def read_key_variable(value: object) -> object:
    if isinstance(value, str) and value and not _VARIABLE.fullmatch(value):
        raise ValueError(
            "is not the name of an environment variable", "write a name, not the key itself"
        )
    return value


def read_key_sha256(value: object) -> object:
    """Returned in lower case."""
    if not isinstance(value, str) or not value:
        return value
    digest = value.strip().lower()
    if not _SHA256.fullmatch(digest):
        raise ValueError("must be a SHA-256 in 64 hex digits", "`omni-proxy keys hash` prints it")
    return digest


KeyName = Annotated[str, Meta(min_length=1, extra={"read": read_key_name})]
KeyVariable = Annotated[str, Meta(extra={"read": read_key_variable})]
KeySha256 = Annotated[str, Meta(extra={"read": read_key_sha256})]


class KeySource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named key, with exactly one source."""

    # Name in logs and metrics.
    name: KeyName
    # Environment variable with the key.
    key_env: KeyVariable = ""
    # File with the key; read again when it changes.
    key_file: str = ""
    # SHA-256 of the key.
    key_sha256: KeySha256 = ""

    @property
    def source(self) -> str:
        """The one of SOURCES that is set, or ""."""
        return next((name for name in SOURCES if getattr(self, name)), "")


Limit = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Model = Annotated[str, Meta(min_length=1)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]


class CallerKey(KeySource, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A caller of model routes. If there is any such table, model routes need a key."""

    # Models, aliases and adapters that its requests may name; empty: all.
    models: tuple[Model, ...] = ()
    # Most requests in flight of this caller; above it 429; 0: no limit.
    max_inflight: Limit = 0
    # Most requests of this caller in any 60 s; above it 429; 0: no limit.
    requests_per_minute: Limit = 0
    # Most tokens of its prompts and completions in any 60 s; above it 429; 0: no limit. An estimate
    # is reserved first, and replaced by the usage in the response.
    tokens_per_minute: Limit = 0
    # Requests with a higher priority leave the admission queue first.
    priority: Priority = 0


class SavedKey(CallerKey, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A caller's key that was added over HTTP, by its SHA-256."""


def source_findings(
    entries: Sequence[Mapping[str, Any]], path: Path
) -> Iterator[tuple[Path, str, str]]:
    """Rules for the list of key tables at `path`. For `validate.check_rules`."""
    if len(entries) > MAX_KEYS:
        yield path, f"has {len(entries)} entries, at most {MAX_KEYS} are allowed", ""
    first: dict[tuple[str, str], Path] = {}
    for index, entry in enumerate(entries):
        place: Path = (*path, index)
        sources = [name for name in SOURCES if entry.get(name)]
        if len(sources) != 1:
            yield place, f"needs exactly one of {', '.join(SOURCES)}, has {len(sources)}", ""
        for name in ("name", "key_sha256"):
            value = entry.get(name)
            if not value:
                continue
            if (name, value) in first:
                noun = f"name {value}" if name == "name" else "SHA-256"
                hint = f"{format_path(first[name, value])} has it already"
                yield (*place, name), f"duplicate {noun}", hint
            first.setdefault((name, value), (*place, name))


def unknown_key_hint(struct: type[Struct], key: str) -> str:
    """A hint if the name suggests that the API key itself was written into the file, else ""."""
    if not issubclass(struct, KeySource) or key.lower() not in _KEY_ITSELF:
        return ""
    return (
        "keys are not written into the file: name the environment variable (key_env), a file "
        "(key_file) or the SHA-256 (key_sha256)"
    )
