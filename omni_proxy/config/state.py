"""The saved state: changes made over HTTP, as TOML text. The program never writes FILE.

Seven parts: added workers; overrides (`switches`) of workers that another source names; tombstones
of such workers that were deleted; workers to be deleted once they are drained (`leaving`); records
of who disabled a worker (`disabled_by`); uploaded voices; and added callers. Parsed as strictly as
FILE: a text with any problem is refused as a whole.
"""

from typing import Any, Final, Literal

import msgspec
import tomli_w
from msgspec import Struct

from omni_proxy.config.api_keys import SavedKey, source_findings
from omni_proxy.config.fields import (
    CAPABILITIES,
    BootstrapPort,
    Capabilities,
    Count,
    KvEvents,
    KvReplay,
    Loras,
    NetworkUrl,
    OptionalWorkerUrl,
    Weight,
    WorkerRanks,
)
from omni_proxy.config.parse import config_error, decode_text, parse_tables
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
    bootstrap_port: BootstrapPort = 0
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
    bootstrap_port: BootstrapPort | None = None
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
    spelled: dict[str, Any] = msgspec.to_builtins(state)
    spelled["switches"] = {
        url: {key: value for key, value in switch.items() if value is not None}
        for url, switch in spelled["switches"].items()
    }
    spelled["voices"] = {
        key: value for key, value in spelled["voices"].items() if value not in ("", None)
    }
    spelled["keys"] = [
        {name: value for name, value in key.items() if value not in ("", 0, [], ())}
        for key in spelled["keys"]
    ]
    spelled["tombstones"] = {
        url: fingerprint
        for url, fingerprint in state.tombstones.items()
        if fingerprint != FLAG_FINGERPRINT
    }
    return _HEAD + tomli_w.dumps({name: part for name, part in spelled.items() if part})


def _duplicate_urls(values: dict[str, Any]) -> list[Finding]:
    urls = [worker.get("url") for worker in values.get("workers", [])]
    return [
        (("workers", index, "url"), f"duplicate worker URL {url}", "")
        for index, url in enumerate(urls)
        if url is not None and url in urls[:index]
    ]
