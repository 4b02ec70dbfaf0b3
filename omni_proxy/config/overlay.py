"""The desired workers: FILE, overlaid by the saved state and the flags.

Later sources override earlier ones; entries with the same URL are the same worker. Functions return
new values and modify nothing.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
from msgspec import structs

from omni_proxy.config.fields import CAPABILITIES, Capability
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
from omni_proxy.shared.engine_protocol import KvConnector

__all__ = [
    "DisabledBy",
    "Discovered",
    "FoundWorker",
    "Origin",
    "SavedState",
    "StateWorker",
    "WorkerOverride",
    "WorkerSpec",
    "bind_to_found",
    "desired_workers",
    "prune_state",
    "read_state",
    "render_state",
    "spec_of",
    "unnamed_workers",
    "with_added",
    "with_defaults",
    "with_deleted",
    "with_disabled_by",
    "with_override",
    "with_pending_delete",
]

Origin = Literal["file", "launch", "flag", "api", "discover"]
MAX_ABSENT: Final = 1024  # switches and tombstones kept of discovered workers that are absent now
_FOUND: Final = "found:"  # prefix of the identity in a tombstone


@dataclass(frozen=True, slots=True)
class Discovered:
    """Source and identity of a discovered worker. The same URL with another `uid` is another
    worker, which replaced the earlier one."""

    source: str  # the name of its [[discover]]
    uid: str  # of the pod; for DNS the URL
    namespace: str = ""
    pod: str = ""


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
    discovered: Discovered | None = None  # of origin "discover"


class FoundWorker:
    """A worker as discovery found it, without changes made over HTTP. Its spec is cached: building
    thousands of them again at each change would stall the event loop."""

    __slots__ = ("_defaults", "_spec", "discovered", "entry")

    def __init__(self, entry: WorkerEntry, discovered: Discovered) -> None:
        self.entry = entry
        self.discovered = discovered
        self._defaults: tuple[object, ...] = ()
        self._spec: WorkerSpec | None = None

    def is_as(self, other: "FoundWorker") -> bool:
        return self.entry == other.entry and self.discovered == other.discovered

    def spec(self, config: Config) -> WorkerSpec:
        """The desired configuration, with the defaults of `config`."""
        defaults = (config.routing.model, config.routing.ranks)
        if self._spec is None or self._defaults != defaults:
            spec = _desired(self.entry, "discover", self.entry)
            self._spec = with_defaults(replace(spec, discovered=self.discovered), config)
            self._defaults = defaults
        return self._spec


def desired_workers(
    config: Config,
    flag_workers: Sequence[str | WorkerEntry],
    state: SavedState,
    found: Sequence[FoundWorker] = (),
) -> tuple[WorkerSpec, ...]:
    """Workers in the order: FILE, launch, flags, added over HTTP, discovered. Discovery does not
    change workers that another source names."""
    workers: dict[str, WorkerSpec] = {}
    named_urls: set[str] = set()
    for entry, origin, fingerprint in _named(config, flag_workers):
        named_urls.add(entry.url)
        if entry.url not in workers and not _has_tombstone(state, entry.url, fingerprint):
            switched = _switched(entry, _switch_of(state, entry.url, None))
            workers[entry.url] = _desired(switched, origin, entry)
    for added in state.workers:
        other = workers.get(added.url)
        workers[added.url] = _desired(added, other.origin if other else "api", other)
    specs = {url: with_defaults(worker, config) for url, worker in workers.items()}
    for worker_found in found:
        url = worker_found.entry.url
        if url in specs or url in named_urls:  # a named worker that was deleted stays deleted
            continue
        touched = url in state.switches or url in state.tombstones
        worker = _changed_over_http(worker_found, state) if touched else worker_found
        if worker is not None:
            specs[url] = worker.spec(config)
    return tuple(specs.values())


def _changed_over_http(found: FoundWorker, state: SavedState) -> FoundWorker | None:
    """None if the worker was deleted."""
    url, uid = found.entry.url, found.discovered.uid
    if state.tombstones.get(url) == _FOUND + uid:
        return None
    entry = _switched(found.entry, _switch_of(state, url, uid))
    return FoundWorker(entry, found.discovered)


def unnamed_workers(specs: Iterable[WorkerSpec]) -> list[WorkerSpec]:
    """Workers that requests with a model name can't reach: they name no model while others do."""
    specs = list(specs)
    unnamed = [spec for spec in specs if not spec.model and not spec.loras]
    return unnamed if len(unnamed) < len(specs) else []


def with_defaults(worker: WorkerSpec, config: Config) -> WorkerSpec:
    """`worker` with the defaults that `config` has for all workers."""
    secure = worker.url.startswith("https:") and worker.tls_verify
    return replace(
        worker,
        model=worker.model or config.routing.model or None,
        ranks=worker.ranks or config.routing.ranks,
        tls_ca=worker.tls_ca or config.server.tls_worker_ca if secure else "",
    )


def spec_of(worker: StateWorker, origin: Origin) -> WorkerSpec:
    """The spec of a worker that was added over HTTP, without the configuration's defaults."""
    return _desired(worker, origin, None)


def prune_state(
    state: SavedState,
    config: Config,
    flag_workers: Sequence[str | WorkerEntry] = (),
    found: Sequence[FoundWorker] = (),
) -> SavedState:
    """Drop tombstones of entries that changed or were removed, and switches of workers that no
    source names. Those of a discovered worker are kept while it is absent, as it may return; they
    are dropped when [[discover]] is removed, or another worker has its URL."""
    fingerprints: dict[str, str] = {}
    for entry, _, fingerprint in _named(config, flag_workers):
        fingerprints.setdefault(entry.url, fingerprint)
    uids = {worker.entry.url: worker.discovered.uid for worker in reversed(found)}

    def may_return(url: str, uid: str) -> bool:
        return bool(config.discover) and url not in fingerprints and uids.get(url, uid) == uid

    switches = {
        url: switch
        for url, switch in state.switches.items()
        if (url in fingerprints if switch.found is None else may_return(url, switch.found))
    }
    tombstones = {
        url: digest
        for url, digest in state.tombstones.items()
        if fingerprints.get(url) == digest
        or (digest.startswith(_FOUND) and may_return(url, digest.removeprefix(_FOUND)))
    }
    absent = [url for url, switch in switches.items() if switch.found and url not in uids]
    for url in absent[:-MAX_ABSENT]:
        del switches[url]
    absent = [
        url for url, mark in tombstones.items() if mark.startswith(_FOUND) and url not in uids
    ]
    for url in absent[:-MAX_ABSENT]:
        del tombstones[url]
    kept = {*fingerprints, *_added(state), *(url for url in switches if switches[url].found)}
    return structs.replace(
        state,
        switches=switches,
        tombstones=tombstones,
        leaving=tuple(url for url in state.leaving if url in kept),
        disabled_by={url: record for url, record in state.disabled_by.items() if url in kept},
    )


def bind_to_found(
    state: SavedState, desired: Iterable[WorkerSpec], found: Sequence[FoundWorker]
) -> SavedState:
    """After an edit: bind the changes of a discovered worker to its identity, so that they don't
    apply to a later worker with its URL. `desired`: the workers before the edit."""
    of_discovery = {spec.url for spec in desired if spec.discovered is not None}
    uids = {
        worker.entry.url: worker.discovered.uid
        for worker in reversed(found)
        if worker.entry.url in of_discovery
    }
    switches = {
        url: structs.replace(switch, found=uids[url])
        if url in uids and switch.found is None
        else switch
        for url, switch in state.switches.items()
    }
    tombstones = {
        url: _FOUND + uids[url] if url in uids and digest == FLAG_FINGERPRINT else digest
        for url, digest in state.tombstones.items()
    }
    return structs.replace(state, switches=switches, tombstones=tombstones)


def with_added(state: SavedState, entry: WorkerSpec) -> SavedState:
    """Add a worker from HTTP; it replaces everything that the state had for its URL."""
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
    """`fields` are those of `WorkerOverride`; `model=None` removes the worker's model. Enabling a
    worker cancels its pending deletion."""
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
    """Record who disabled the worker; the first record stays until the worker is enabled."""
    return structs.replace(state, disabled_by={url: record} | state.disabled_by)


def with_pending_delete(state: SavedState, url: str) -> SavedState:
    """Disable the worker now; it is deleted once it is drained."""
    leaving = tuple(dict.fromkeys((*state.leaving, url)))
    return structs.replace(with_override(state, url, disabled=True), leaving=leaving)


def with_deleted(state: SavedState, config: Config, url: str) -> SavedState:
    """Delete the worker; a tombstone also hides it in FILE, launch and flags."""
    fingerprints = {entry.url: fingerprint for entry, _, fingerprint in _named(config, ())}
    cleared = _without(state, url)
    tombstones = {**cleared.tombstones, url: fingerprints.get(url, FLAG_FINGERPRINT)}
    return structs.replace(cleared, tombstones=tombstones)


def _named(
    config: Config, flag_workers: Sequence[str | WorkerEntry]
) -> Iterator[tuple[WorkerEntry, Origin, str]]:
    """Each worker that FILE, launch or a flag names, with its entry's fingerprint: the state can
    only override or hide it."""
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
    for flag in flag_workers:
        entry = WorkerEntry(url=flag) if isinstance(flag, str) else flag
        yield entry, "flag", FLAG_FINGERPRINT


# Keys that are newer than tombstones: with its default value such a key is left out of the
# fingerprint, so that tombstones of earlier releases stay valid.
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


def _has_tombstone(state: SavedState, url: str, fingerprint: str) -> bool:
    """A tombstone of FILE's entry also applies to a flag with the same URL."""
    digest = state.tombstones.get(url)
    return digest is not None and fingerprint in {digest, FLAG_FINGERPRINT}


def _switch_of(state: SavedState, url: str, uid: str | None) -> WorkerOverride | None:
    """The override of the worker with this URL. `uid`: of a discovered worker, else None."""
    switch = state.switches.get(url)
    return switch if switch is not None and switch.found == uid else None


def _switched(entry: WorkerEntry, switch: WorkerOverride | None) -> WorkerEntry:
    if switch is None:
        return entry
    touched = {key: value for key, value in structs.asdict(switch).items() if value is not None}
    touched.pop("found", None)
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
