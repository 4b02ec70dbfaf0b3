"""The desired workers: FILE, overlaid by the saved state and the flags.

Later sources win over earlier ones; workers with the same URL are one worker. Every function
returns a new value and changes nothing.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
from msgspec import structs

from omni_proxy.config.fields import CAPABILITIES, Capability, KvConnector
from omni_proxy.config.schema import Config, LaunchEntry, WorkerEntry
from omni_proxy.config.state import (
    FLAG_FINGERPRINT,
    DisabledBy,
    SavedState,
    StateWorker,
    WorkerOverride,
    read_state,
    render_state,
)

__all__ = [
    "DisabledBy",
    "Origin",
    "SavedState",
    "StateWorker",
    "WorkerOverride",
    "WorkerSpec",
    "desired_workers",
    "prune_state",
    "read_state",
    "render_state",
    "spec_of",
    "with_added",
    "with_defaults",
    "with_deleted",
    "with_disabled_by",
    "with_override",
    "with_pending_delete",
]

Origin = Literal["file", "launch", "flag", "api"]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The desired configuration of one worker, all sources merged."""

    url: str
    model: str | None
    capabilities: frozenset[str]
    disabled: bool
    weight: int
    max_inflight: int
    origin: Origin
    api_key_env: str = ""
    tls_ca: str = ""
    tls_verify: bool = True
    role: Literal["", "regular", "prefill", "decode"] = ""  # "": as the engine reports
    kv_connector: KvConnector = "sglang"  # of prefill and decode workers
    bootstrap_port: int | None = None  # of prefill workers; None while unknown
    ranks: int | Literal["auto"] = 0  # 0, before `with_defaults`: routing.ranks
    loras: tuple[str, ...] | Literal["auto"] = ()
    kv_events: str = "off"
    kv_replay: str = ""


def desired_workers(
    config: Config, flag_workers: Sequence[str | WorkerEntry], state: SavedState
) -> tuple[WorkerSpec, ...]:
    """FILE's order first, then launch, flags, and workers added over HTTP."""
    workers: dict[str, WorkerSpec] = {}
    for entry, origin, fingerprint in _named(config, flag_workers):
        if entry.url not in workers and not _buried(state, entry.url, fingerprint):
            switched = _switched(entry, state.switches.get(entry.url, WorkerOverride()))
            workers[entry.url] = _desired(switched, origin, entry)
    for added in state.workers:
        other = workers.get(added.url)
        workers[added.url] = _desired(added, other.origin if other else "api", other)
    return tuple(with_defaults(worker, config) for worker in workers.values())


def with_defaults(worker: WorkerSpec, config: Config) -> WorkerSpec:
    """With the defaults that `config` has for all workers."""
    secure = worker.url.startswith("https:") and worker.tls_verify
    return replace(
        worker,
        model=worker.model or config.routing.model or None,
        ranks=worker.ranks or config.routing.ranks,
        tls_ca=worker.tls_ca or config.server.tls_worker_ca if secure else "",
    )


def spec_of(worker: StateWorker, origin: Origin) -> WorkerSpec:
    """Without the defaults that a configuration has."""
    return _desired(worker, origin, None)


def prune_state(
    state: SavedState, config: Config, flag_workers: Sequence[str | WorkerEntry] = ()
) -> SavedState:
    """Without what lost its object: tombstones over entries that changed or went away, switches
    on workers that nothing names."""
    fingerprints: dict[str, str] = {}
    for entry, _, fingerprint in _named(config, flag_workers):
        fingerprints.setdefault(entry.url, fingerprint)
    return structs.replace(
        state,
        switches={url: switch for url, switch in state.switches.items() if url in fingerprints},
        tombstones={
            url: digest
            for url, digest in state.tombstones.items()
            if fingerprints.get(url) == digest
        },
        leaving=tuple(url for url in state.leaving if url in {*fingerprints, *_added(state)}),
        disabled_by={
            url: record
            for url, record in state.disabled_by.items()
            if url in fingerprints or url in _added(state)
        },
    )


def with_added(state: SavedState, entry: WorkerSpec) -> SavedState:
    """A worker from HTTP, in the place of whatever the state had under its URL."""
    added = StateWorker(
        url=entry.url,
        model=entry.model or "",
        capabilities=_in_order(entry.capabilities),
        disabled=entry.disabled,
        weight=entry.weight,
        max_inflight=entry.max_inflight,
        role=entry.role,
        kv_connector=entry.kv_connector,
        bootstrap_port=entry.bootstrap_port or 0,
        ranks=entry.ranks,
        loras=entry.loras,
        kv_events=entry.kv_events,
        kv_replay=entry.kv_replay,
    )
    cleared = _without(state, entry.url)
    return structs.replace(cleared, workers=(*cleared.workers, added))


def with_override(state: SavedState, url: str, **fields: Any) -> SavedState:
    """`fields` are those of `WorkerOverride`; `model=None` makes the worker name none. Who is
    enabled does
    not leave any more."""
    if fields.get("disabled") is False:
        leaving = tuple(other for other in state.leaving if other != url)
        records = {other: who for other, who in state.disabled_by.items() if other != url}
        state = structs.replace(state, leaving=leaving, disabled_by=records)
    if "model" in fields:
        fields["model"] = fields["model"] or ""
    if "capabilities" in fields:
        fields["capabilities"] = _in_order(fields["capabilities"])
    if url in _added(state):
        return structs.replace(
            state,
            workers=tuple(
                structs.replace(worker, **fields) if worker.url == url else worker
                for worker in state.workers
            ),
        )
    switch = structs.replace(state.switches.get(url, WorkerOverride()), **fields)
    return structs.replace(state, switches={**state.switches, url: switch})


def with_disabled_by(state: SavedState, url: str, record: DisabledBy) -> SavedState:
    """Note who disabled it; the first one stays until it is enabled."""
    return structs.replace(state, disabled_by={url: record} | state.disabled_by)


def with_pending_delete(state: SavedState, url: str) -> SavedState:
    """Disabled now, and deleted once it is drained."""
    leaving = tuple(dict.fromkeys((*state.leaving, url)))
    return structs.replace(with_override(state, url, disabled=True), leaving=leaving)


def with_deleted(state: SavedState, config: Config, url: str) -> SavedState:
    """Also buries what FILE, launch or a flag names by this URL."""
    fingerprints = {entry.url: fingerprint for entry, _, fingerprint in _named(config, ())}
    cleared = _without(state, url)
    tombstones = {**cleared.tombstones, url: fingerprints.get(url, FLAG_FINGERPRINT)}
    return structs.replace(cleared, tombstones=tombstones)


def _named(
    config: Config, flag_workers: Sequence[str | WorkerEntry]
) -> Iterator[tuple[WorkerEntry, Origin, str]]:
    """Each worker that the state can only switch or bury, with its entry's fingerprint."""
    for entry in config.workers:
        yield entry, "file", _fingerprint(entry)
    for group in config.launch:
        for index, url in enumerate(group.urls):
            worker = WorkerEntry(
                url=url,
                model=group.model,
                capabilities=group.capabilities,
                role=group.role,
                kv_connector=group.kv_connector,
                bootstrap_port=group.base_bootstrap_port + index,
                kv_events=group.kv_events,
            )
            yield worker, "launch", _fingerprint(group)
    for given in flag_workers:
        entry = WorkerEntry(url=given) if isinstance(given, str) else given
        yield entry, "flag", FLAG_FINGERPRINT


# Keys that came after tombstones: with its default such a key leaves a fingerprint as it was, so
# that a tombstone of an earlier release holds.
_LATER_KEYS: Final = (
    "role", "kv_connector", "bootstrap_port", "base_bootstrap_port", "ranks", "loras",
    "kv_events", "kv_replay",
)  # fmt: skip


def _fingerprint(entry: WorkerEntry | LaunchEntry) -> str:
    values = msgspec.to_builtins(entry)
    default = WorkerEntry(url="") if isinstance(entry, WorkerEntry) else LaunchEntry(command=())
    plain = msgspec.to_builtins(default)
    values = {
        key: value for key, value in values.items() if key not in _LATER_KEYS or value != plain[key]
    }
    return hashlib.sha256(msgspec.json.encode(values, order="sorted")).hexdigest()[:16]


def _buried(state: SavedState, url: str, fingerprint: str) -> bool:
    """A tombstone over FILE's entry holds for a flag with the same URL too."""
    digest = state.tombstones.get(url)
    return digest is not None and fingerprint in {digest, FLAG_FINGERPRINT}


def _switched(entry: WorkerEntry, switch: WorkerOverride) -> WorkerEntry:
    touched = {key: value for key, value in structs.asdict(switch).items() if value is not None}
    return structs.replace(entry, **touched)


def _desired(
    entry: WorkerEntry | StateWorker, origin: Origin, base: WorkerEntry | WorkerSpec | None
) -> WorkerSpec:
    """`base` has the keys that can't be set over HTTP."""
    return WorkerSpec(
        url=entry.url,
        model=entry.model or None,
        capabilities=frozenset(entry.capabilities),
        disabled=entry.disabled,
        weight=entry.weight,
        max_inflight=entry.max_inflight,
        origin=origin,
        api_key_env=base.api_key_env if base else "",
        tls_ca=base.tls_ca if base else "",
        tls_verify=base.tls_verify if base else True,
        role=entry.role,
        kv_connector=entry.kv_connector or "sglang",
        bootstrap_port=entry.bootstrap_port or None,
        ranks=entry.ranks,
        loras=entry.loras,
        kv_events=entry.kv_events,
        kv_replay=entry.kv_replay,
    )


def _in_order(capabilities: Iterable[str]) -> tuple[Capability, ...]:
    return tuple(name for name in CAPABILITIES if name in set(capabilities))


def _without(state: SavedState, url: str) -> SavedState:
    return structs.replace(
        state,
        workers=tuple(worker for worker in state.workers if worker.url != url),
        switches={other: switch for other, switch in state.switches.items() if other != url},
        tombstones={other: digest for other, digest in state.tombstones.items() if other != url},
        leaving=tuple(other for other in state.leaving if other != url),
        disabled_by={other: who for other, who in state.disabled_by.items() if other != url},
    )


def _added(state: SavedState) -> set[str]:
    return {worker.url for worker in state.workers}
