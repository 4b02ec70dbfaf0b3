"""The saved state: changes made over HTTP, as TOML text. The program never writes FILE.

Seven parts: added workers; overrides (`switches`) of workers that another source names; tombstones
of such workers that were deleted; workers to be deleted once they are drained (`leaving`); records
of who disabled a worker (`disabled_by`); uploaded voices; and added callers. Parsed as strictly as
FILE: a text with any problem is refused as a whole. Only the SHA-256 of a key is saved. FILE takes
precedence: its entries hide saved callers with the same name or key. Functions modify nothing.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import tomli_w
from msgspec import Struct, structs

from omni_proxy.config.fields import (
    CAPABILITIES,
    Capabilities,
    Count,
    KvEvents,
    KvReplay,
    Loras,
    NetworkUrl,
    OptionalWorkerUrl,
    PortOrZero,
    Weight,
    WorkerRanks,
)
from omni_proxy.config.parse import config_error, decode_text, parse_tables
from omni_proxy.config.problem import format_path
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import MAX_KEYS, SavedKey, source_findings
from omni_proxy.config.validate import Finding, walk

_HEAD: Final = """\
# Written by omni-proxy: workers, switches and keys that were set over HTTP.
# Stop the program before you change it, or delete it to go back to the configuration file.
"""

# A worker of a flag has no entry that could change. Its tombstone is not saved: at the next start
# the command line applies again.
FLAG_FINGERPRINT: Final = "flag"


class StateWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker that was added over HTTP."""

    url: NetworkUrl
    model: str = ""
    capabilities: Capabilities = CAPABILITIES
    disabled: bool = False
    weight: Weight = 1
    max_inflight: Count = 0
    role: Literal["", "regular", "prefill", "decode"] = ""
    kv_connector: Literal["", "sglang", "nixl", "mooncake"] = ""
    bootstrap_port: PortOrZero = 0
    ranks: WorkerRanks = 0
    loras: Loras = ()
    kv_events: KvEvents = "off"
    kv_replay: KvReplay = ""


class WorkerOverride(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes made over HTTP to a worker that another source names; None: unchanged."""

    # "": the worker names no model, even if FILE does.
    model: str | None = None
    capabilities: Capabilities | None = None
    disabled: bool | None = None
    weight: Weight | None = None
    max_inflight: Count | None = None
    role: Literal["regular", "prefill", "decode"] | None = None
    kv_connector: Literal["sglang", "nixl", "mooncake"] | None = None
    bootstrap_port: PortOrZero | None = None
    # Identity of a worker that was discovered; None: another source names it.
    found: str | None = None


class SavedVoices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker that keeps the uploaded voices, and their names; None while they are unknown."""

    owner: OptionalWorkerUrl = ""
    names: tuple[str, ...] | None = None


class DisabledBy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who disabled or drained a worker, as far as the request said, and when (ISO 8601)."""

    by: str = ""
    at: str = ""


class SavedState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: tuple[StateWorker, ...] = ()
    switches: dict[str, WorkerOverride] = {}
    # URL -> fingerprint of the entry that named the worker when it was deleted; for a discovered
    # worker its identity.
    tombstones: dict[str, str] = {}
    voices: SavedVoices = SavedVoices()
    leaving: tuple[str, ...] = ()  # URLs of workers to be deleted once they are drained
    disabled_by: dict[str, DisabledBy] = {}  # of workers that HTTP disabled, by URL
    keys: tuple[SavedKey, ...] = ()


def read_state(text: str | bytes, file: str) -> SavedState:
    """Raises ConfigError with all problems of the text."""
    text = decode_text(text, file)
    values, findings = walk(parse_tables(text, file), SavedState)
    findings += [*_duplicate_urls(values), *source_findings(values.get("keys", []), ("keys",))]
    if findings:
        raise config_error(findings, text, file)
    return msgspec.convert(values, SavedState)


def render_state(state: SavedState) -> str:
    document: dict[str, Any] = msgspec.to_builtins(state)
    document["switches"] = {
        url: {key: value for key, value in switch.items() if value is not None}
        for url, switch in document["switches"].items()
    }
    document["voices"] = {
        key: value for key, value in document["voices"].items() if value not in ("", None)
    }
    document["keys"] = [
        {name: value for name, value in key.items() if value not in ("", 0, [], ())}
        for key in document["keys"]
    ]
    document["tombstones"] = {
        url: fingerprint
        for url, fingerprint in state.tombstones.items()
        if fingerprint != FLAG_FINGERPRINT
    }
    return _HEAD + tomli_w.dumps({name: part for name, part in document.items() if part})


def _duplicate_urls(values: dict[str, Any]) -> list[Finding]:
    urls = [worker.get("url") for worker in values.get("workers", [])]
    return [
        (("workers", index, "url"), f"duplicate worker URL {url}", "")
        for index, url in enumerate(urls)
        if url is not None and url in urls[:index]
    ]


_REQUIRED: Final = ("name", "key_sha256")


class KeyRefused(Exception):
    """The key can't be added; the message has the reason."""


class KeyExists(Exception):
    """Another caller already has the name or the key."""


def read_saved_key(body: Mapping[str, object]) -> SavedKey:
    """Parse the body of a request. Raises KeyRefused."""
    values, findings = walk(dict(body), SavedKey)
    for path, reason, hint in findings:
        name = format_path(path) or "body"
        raise KeyRefused(f"{name}: {reason}" + (f"; {hint}" if hint else ""))
    for name in _REQUIRED:
        if not values.get(name):
            raise KeyRefused(f"{name} is missing")
    if values.get("key_env") or values.get("key_file"):
        raise KeyRefused("over HTTP a key can be given only as key_sha256")
    return msgspec.convert(values, SavedKey)


def with_saved_keys(config: Config, state: SavedState) -> Config:
    """`config` with the saved keys of `state`, which replace any saved keys in `config`."""
    own = tuple(entry for entry in config.keys if not isinstance(entry, SavedKey))
    names = {entry.name for entry in own}
    hashes = {entry.key_sha256 for entry in own}
    saved = (key for key in state.keys if key.name not in names and key.key_sha256 not in hashes)
    keys = (*own, *saved)
    return config if keys == config.keys else structs.replace(config, keys=keys)


def with_key(key: SavedKey, state: SavedState, config: Config) -> SavedState:
    """Raises KeyExists, and KeyRefused if MAX_KEYS is reached."""
    for entry in (*config.keys, *state.keys):
        if entry.name == key.name:
            raise KeyExists(f"caller {key.name} already exists")
        if entry.key_sha256 == key.key_sha256:
            raise KeyExists(f"caller {entry.name} already has this key")
    if len(config.keys) >= MAX_KEYS:
        raise KeyRefused(f"the limit of {MAX_KEYS} keys is reached")
    return structs.replace(state, keys=(*state.keys, key))


def without_hidden_keys(state: SavedState, config: Config) -> SavedState:
    """Drop saved keys that FILE hides, so that they don't return when FILE's entry is removed."""
    kept = tuple(key for key in state.keys if key in config.keys)
    return state if kept == state.keys else structs.replace(state, keys=kept)


def without_key(state: SavedState, name: str) -> SavedState:
    """Raises KeyError if no key with this name was added over HTTP."""
    if all(key.name != name for key in state.keys):
        raise KeyError(name)
    return structs.replace(state, keys=tuple(key for key in state.keys if key.name != name))
