"""Interfaces of the other packages as the admin API uses them, so that tests can replace them.

Invariant: the admin API imports neither the data plane nor the server; `Services` is passed to it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import trio

from omni_proxy.admin_ops.abort_requests import AbortFindings, AbortTarget
from omni_proxy.cluster.proxy_figures import WorkerFigures
from omni_proxy.config.schema import AdminKey
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.discovery.endpoints import SourceReport
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.prober import Prober
from omni_proxy.kv_events.event_follower import EventCounts
from omni_proxy.picker.picker import Selection
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.affinity_key import AffinityKeyReader
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.model_aliases import ModelAliases, TargetChecks
from omni_proxy.routing.pinning import ResponseOwners
from omni_proxy.routing.policies import Policy
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.worker_drain import WorkerDrains
from omni_proxy.telemetry.instruments import Instruments
from omni_proxy.weight_sync.weight_operations import WeightOperations


class DataPlaneView(Protocol):
    """The data plane, as the admin API uses it."""

    @property
    def policy(self) -> Policy: ...
    @property
    def pool_policies(self) -> PoolPolicies: ...
    def pool_stats(self) -> Mapping[str, Mapping[str, object]]: ...
    @property
    def needs_affinity_key(self) -> bool: ...
    @property
    def affinity_keys(self) -> AffinityKeyReader: ...
    @property
    def draining(self) -> bool: ...
    @property
    def voices(self) -> VoiceRegistry: ...
    @property
    def response_owners(self) -> ResponseOwners: ...
    @property
    def aliases(self) -> ModelAliases | None: ...
    @property
    def target_checks(self) -> TargetChecks: ...
    async def abort(self, target: AbortTarget) -> AbortFindings: ...
    def status(self) -> dict[str, object]: ...
    def counts(self) -> dict[str, object]: ...
    def admission(self) -> dict[str, int]: ...
    def watchdog(self) -> dict[str, object]: ...
    def rows(self) -> list[dict[str, object]]: ...
    def addresses(self) -> list[str]: ...
    def served_at(self) -> tuple[str, str]:
        """URLs of the listeners that take model traffic and that have the dashboard; see
        `dataplane.accept.listeners.ServedAt`."""

    def finish_session(self, key: str) -> bool: ...
    def session_count(self, worker: Worker) -> int: ...


class ClusterView(Protocol):
    """This proxy as a member of a cluster."""

    @property
    def refuses(self) -> bool: ...
    def status(self) -> dict[str, object] | None: ...
    def peer_figures(self, worker: Worker) -> WorkerFigures | None:
        """Figures of all other proxies together; None without any."""


class WorkerChoice(Protocol):
    """`target`: a worker, or a data-parallel rank; see `picker.service`."""

    @property
    def target(self) -> Worker: ...
    @property
    def model(self) -> str | None: ...
    @property
    def reservation_id(self) -> str | None: ...
    @property
    def lease_secs(self) -> float: ...


class PickerView(Protocol):
    """`successor`: path of the admin socket of the program that has taken over reservations."""

    @property
    def successor(self) -> str: ...
    async def select(self, selection: Selection) -> WorkerChoice: ...
    async def reserve(self, selection: Selection) -> WorkerChoice: ...
    async def release(self, reservation_id: str) -> None: ...
    def status(self) -> dict[str, object]: ...


class LauncherView(Protocol):
    def status(self) -> list[dict[str, object]]: ...


class KvEventFacts(NamedTuple):
    """Event counts of workers with KV events, and the blocks that these report as cached."""

    counts: Mapping[Worker, EventCounts]
    blocks: BlockIndex


class DiscoveryView(Protocol):
    def reports(self) -> list[SourceReport]: ...
    def reason(self, worker: Worker) -> str: ...


class _NoDiscovery:
    """The `DiscoveryView` without [[discover]]."""

    def reports(self) -> list[SourceReport]:
        return []

    def reason(self, worker: Worker) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class WorkerServices:
    """The fleet, and what acts on its workers."""

    fleet: Fleet
    prober: Prober
    drains: WorkerDrains
    launcher: LauncherView | None = None
    discovery: DiscoveryView = field(default_factory=_NoDiscovery)
    # Reads the workers' adapters again.
    refresh_adapters: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint


@dataclass(frozen=True, slots=True)
class KeyServices:
    """The keys of [[admin.keys]], and those of [[keys]], which callers of model routes have."""

    find_admin_key: Callable[[bytes], AdminKey | None] = lambda _: None
    find_caller: Callable[[bytes], CallerKey | None] = lambda _: None
    # The usage of each caller, by its name; see `multiprocess.shared_keys`.
    usage: Callable[[], dict[str, dict[str, int]]] = dict
    error: Callable[[], str] = str  # why the newest key files are not in use


@dataclass(frozen=True, slots=True)
class TelemetryServices:
    """`write_audit` takes a line of the audit log."""

    instruments: Instruments
    kv_events: KvEventFacts = field(default_factory=lambda: KvEventFacts({}, BlockIndex()))
    write_audit: Callable[[bytes], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """`leaving` is true from the start of a shutdown, while the data plane still accepts."""

    supervisors: Callable[[], list[dict[str, object]]]
    leaving: Callable[[], bool] = lambda: False
    upgrade: Callable[[], dict[str, object]] = dict  # for GET /status
    proxy_id: str = ""  # see `wire.forwarded`
    # Start of the process: the admin API may be restarted later.
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Services:
    """All of them, for `create_app` and for what reports the whole state. Anything else gets only
    those that it uses."""

    workers: WorkerServices
    config_store: ConfigStore
    data_plane: DataPlaneView
    weight_operations: WeightOperations
    keys: KeyServices
    telemetry: TelemetryServices
    process: ProcessFacts
    cluster: ClusterView | None = None
    picker: PickerView | None = None
