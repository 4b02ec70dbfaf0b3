"""One worker: its configuration, its state, its counters, its capabilities as a bit mask.

Invariant: `routable` is true exactly while the worker is healthy, enabled, not cordoned and has no
half-open request in flight. Membership and health change only through `Fleet`. A traffic class has
the same offset in the counters of every worker; they are one flat list, because a dict of objects
would touch many cache lines per request. `apply_state(worker, worker_state(...))` copies everything
that decides whether a worker is picked for a request, so another process can route by it. Must not
do I/O, read a clock or make JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Final, Literal, TypeAlias, get_args

from msgspec import Struct

from omni_proxy.config.fields import CAPABILITIES, Role
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.url import dial_address, display_id, worker_id
from omni_proxy.fleet.health_state import Health, HealthMachine
from omni_proxy.fleet.weight_version import UNKNOWN_VERSION, WeightVersion
from omni_proxy.wire.load_report import EngineLoad

KvMode: TypeAlias = Literal["off", "inferred", "exact", "degraded"]
KV_MODES: Final[tuple[KvMode, ...]] = get_args(KvMode)
ReportedRole: TypeAlias = Literal["", "prefill", "decode"]
CAPABILITY_BITS: dict[str, int] = {
    name: 1 << position for position, name in enumerate(CAPABILITIES)
}


def capability_mask(names: Iterable[str]) -> int:
    """Raises KeyError for a name that is no capability."""
    mask = 0
    for name in names:
        mask |= CAPABILITY_BITS[name]
    return mask


def capability_names(mask: int) -> list[str]:
    """The names of a mask, sorted."""
    return list(_sorted_names(mask))


@lru_cache
def _sorted_names(mask: int) -> tuple[str, ...]:
    return tuple(sorted(name for name, bit in CAPABILITY_BITS.items() if mask & bit))


CLASSES: Final = 16  # the maximum number of traffic classes
ROUTED, SUCCEEDED, FAILED = range(3)  # attempts begun, and the results of those that ended
_KINDS: Final = 3

_offsets: dict[str, int] = {}


def counter_offset(traffic: str) -> int:
    """Index of the first counter of a class; add ROUTED, SUCCEEDED or FAILED to it."""
    offset = _offsets.setdefault(traffic, _KINDS * len(_offsets))
    assert offset < _KINDS * CLASSES, f"too many traffic classes: {traffic}"
    return offset


def zero_counters() -> list[int]:
    return [0] * (_KINDS * CLASSES)


def counts_by_class(counts: list[int], kind: int) -> dict[str, int]:
    """Counts of one kind by traffic class, without classes whose count is 0."""
    return {
        traffic: counts[offset + kind]
        for traffic, offset in _offsets.items()
        if counts[offset + kind]
    }


class WorkerLoad:
    """The counters that each attempt updates and policies compare."""

    __slots__ = ("counts", "in_flight", "load_offset", "peak_in_flight")

    counts: list[int]
    in_flight: int
    load_offset: float
    peak_in_flight: int


class _RequestFields(WorkerLoad):
    """Fields that every request touches. The slots of a base class come first in memory, so these
    share cache lines."""

    __slots__ = (
        "api_key_env",
        "health",
        "inflight_bound",
        "is_plain",
        "route_line",
        "weight_version",
    )


class Worker(_RequestFields):
    """A server behind a base URL.

    `in_flight`: exchanges in flight until their last byte, including those of other proxies of the
    cluster (`peer_in_flight`). `inflight_bound`: at this number it gets no more requests; it
    is `max_inflight`, or in a cluster this proxy's share of it. `load_offset`: added by policies
    that compare loads, to smooth the number in flight at peers (`load_of`). `is_plain`: it has no
    bound and is no data-parallel rank, so a request is counted only here.
    """

    __slots__ = (
        "adapters",
        "address",
        "bootstrap_port",
        "capabilities",
        "configured_bootstrap_port",
        "configured_role",
        "cordon_reasons",
        "disabled",
        "disabled_changed_at",
        "discovered",
        "display_id",
        "dp_ranks",
        "engine_load",
        "health_body",
        "hop_line",
        "id",
        "instance",
        "kv_connector",
        "kv_events",
        "kv_mode",
        "kv_reason",
        "kv_replay",
        "loras",
        "mask",
        "max_inflight",
        "model",
        "origin",
        "peer_in_flight",
        "ranks",
        "registered_at",
        "reported_adapters",
        "reported_bootstrap_port",
        "reported_ranks",
        "reported_role",
        "role",
        "spec",
        "tls_ca",
        "tls_verify",
        "url",
        "weight",
    )

    def __init__(self, spec: WorkerSpec, now: datetime) -> None:
        self.url = spec.url
        self.id = worker_id(spec.url)
        self.display_id = display_id(spec.url)
        self.route_line = f"X-SGLang-Omni-Worker: {self.id}\r\n".encode("ascii")
        self.address: tuple[str, int] | str = dial_address(spec.url)
        self.health = HealthMachine(now)
        self.registered_at = now
        self.disabled_changed_at = now  # the last change of `disabled`
        self.in_flight = self.peer_in_flight = 0
        self.load_offset = 0  # CPython adds ints faster
        self.peak_in_flight = 0
        self.cordon_reasons: set[str] = set()
        self.health_body: object = None
        self.instance = ""  # identity of its process, from its last good probe
        self.hop_line = b""  # header line for a worker that is a proxy, see `wire.forwarded`
        self.weight_version: WeightVersion = UNKNOWN_VERSION
        self.reported_role: ReportedRole = ""  # by its engine; used if none is configured
        self.reported_bootstrap_port: int | None = None  # likewise
        self.counts = zero_counters()
        self.engine_load: EngineLoad | None = None  # the last report of its engine
        self.dp_ranks: tuple[Worker, ...] = ()  # its ranks, picked instead of the worker itself
        self.reported_adapters: tuple[str, ...] = ()  # by its engine, for `loras = "auto"`
        self.reported_ranks = 0  # by its engine, for `ranks = "auto"`; 0: unknown
        self.kv_mode: KvMode = "off"  # how complete its cache index is, and why
        self.kv_reason = ""
        self.configure(spec)

    def configure(self, spec: WorkerSpec) -> None:
        """Apply a spec with the same URL; health, counts and connections stay."""
        self.spec = spec
        self.model = spec.model
        self.capabilities = spec.capabilities
        self.mask = capability_mask(spec.capabilities)
        self.disabled = spec.disabled
        self.weight = spec.weight
        self.max_inflight = self.inflight_bound = spec.max_inflight
        self.is_plain = not spec.max_inflight
        self.origin = spec.origin
        self.discovered = spec.discovered
        self.api_key_env = spec.api_key_env
        self.tls_ca = spec.tls_ca
        self.tls_verify = spec.tls_verify
        self.configured_role = spec.role
        self.role: Role = spec.role or self.reported_role or "regular"
        self.kv_connector = spec.kv_connector
        self.configured_bootstrap_port = spec.bootstrap_port
        self._note_bootstrap_port()
        self.ranks = spec.ranks
        self.loras = spec.loras
        self.kv_events = spec.kv_events
        self.kv_replay = spec.kv_replay
        self._note_adapters()

    def _note_adapters(self) -> None:
        """Set the names by which requests select its adapters."""
        if self.loras == "auto":
            self.adapters = frozenset(self.reported_adapters)
        else:
            self.adapters = frozenset(
                name for lora in self.loras for name in adapter_names(lora, (self.model,))
            )

    def serves(self, model: str | None) -> bool:
        """Whether `model` is its model or one of its adapters."""
        return model is not None and (model == self.model or model in self.adapters)

    def is_other_than(self, spec: WorkerSpec) -> bool:
        """Whether discovery found another server at the same URL. The health and caches of this
        worker don't apply to that server."""
        current, new = self.discovered, spec.discovered
        return current is not None and new is not None and current.uid != new.uid

    def matches(self, spec: WorkerSpec) -> bool:
        """Whether `configure(spec)` would change nothing."""
        return spec is self.spec or spec == self.spec

    @property
    def worker(self) -> Worker:
        """The worker itself; for a data-parallel rank, the worker that the rank belongs to."""
        return self

    @property
    def rank_count(self) -> int:
        """The number of data-parallel ranks behind its URL; 1 until its engine has reported it."""
        return max(1, self.reported_ranks) if self.ranks == "auto" else self.ranks or 1

    def report_role(self, role: ReportedRole) -> bool:
        """Apply the role that its engine reports, "" for none. Returns whether its role changed."""
        self.reported_role = role
        before, self.role = self.role, self.configured_role or role or "regular"
        return self.role != before

    def report_bootstrap_port(self, port: int | None) -> bool:
        """Apply the port that its engine reports, None for none. Returns whether its port
        changed."""
        self.reported_bootstrap_port = port
        before = self.bootstrap_port
        self._note_bootstrap_port()
        return self.bootstrap_port != before

    def _note_bootstrap_port(self) -> None:
        # Without a configured role, the configured port may only be the default of prefill workers.
        configured, reported = self.configured_bootstrap_port, self.reported_bootstrap_port
        first = configured if self.configured_role else reported
        self.bootstrap_port = first or reported or configured

    @property
    def needs_bootstrap_port(self) -> bool:
        """Whether the port must be read from its engine, because none is configured."""
        return self.configured_role == "prefill" and not self.configured_bootstrap_port

    def report_adapters(self, names: tuple[str, ...]) -> bool:
        """Apply the adapters that its engine reports. Returns whether its adapter names changed."""
        self.reported_adapters = names
        before = self.adapters
        self._note_adapters()
        return self.adapters != before

    def add_counts(
        self, traffic: str, *, routed: int = 0, succeeded: int = 0, failed: int = 0
    ) -> None:
        """Add counts from another process; the data plane counts its own attempts directly."""
        offset = counter_offset(traffic)
        self.counts[offset + ROUTED] += routed
        self.counts[offset + SUCCEEDED] += succeeded
        self.counts[offset + FAILED] += failed

    @property
    def routed(self) -> dict[str, int]:
        """Attempts begun, by traffic class; classes without any are left out."""
        return counts_by_class(self.counts, ROUTED)

    @property
    def succeeded(self) -> dict[str, int]:
        """Successful attempts, by traffic class."""
        return counts_by_class(self.counts, SUCCEEDED)

    @property
    def failed(self) -> dict[str, int]:
        """Attempts that failed, by traffic class."""
        return counts_by_class(self.counts, FAILED)

    @property
    def weight_label(self) -> str | None:
        """The label of its weights, None if unknown."""
        return self.weight_version.label

    @property
    def weight_epoch(self) -> int:
        """The proxy's own number for its weights; 0 if they came from no update of the proxy."""
        return self.weight_version.epoch

    @property
    def routable(self) -> bool:
        health = self.health
        healthy = health.state is Health.HEALTHY and not health.half_open_id
        return healthy and not self.disabled and not self.cordon_reasons


def adapter_names(lora: str, models: Iterable[str | None], *, bare: bool = True) -> list[str]:
    """The names by which requests may select an adapter. vLLM: the adapter's name as the model
    (`bare`). SGLang: `model:adapter`, or the key `lora_path`, represented as `:adapter`."""
    qualified = [f"{model}:{lora}" for model in models if model]
    return [*([lora] if bare else []), *dict.fromkeys(qualified), f":{lora}"]


def shown_adapters(worker: Worker) -> list[str]:
    """The names of its adapters, sorted, without the `:adapter` form of `lora_path`."""
    return sorted(name for name in worker.adapters if not name.startswith(":"))


RankIds: TypeAlias = tuple[tuple[int, int], ...]  # serial and cell of each data-parallel rank

HALF_OPEN_IN_OTHER_PROCESS: Final = (
    -1
)  # a `half_open_id`: only another process may have or begin one


class WorkerState(Struct, frozen=True, array_like=True):
    """A worker's state as a value for other processes. `serial` differs for two workers that had
    the same URL one after the other; `cell` is the index of its shared in-flight counter."""

    entry: WorkerSpec
    serial: int
    cell: int
    address: tuple[str, int] | str
    state: Health
    last_error: str | None
    failed: bool  # some request failed since the last successful one
    breaker_tripped: bool  # ejected, and no half-open request has succeeded yet
    half_open_taken: bool  # one is in flight, or may be begun only by another process
    half_open_count: int  # half-open requests begun so far
    cordon_reasons: tuple[str, ...]
    label: str | None
    epoch: int
    hop_line: bytes = b""
    reported_role: ReportedRole = ""
    reported_ranks: int = 0
    rank_ids: RankIds = ()
    reported_adapters: tuple[str, ...] = ()
    reported_bootstrap_port: int | None = None


def worker_state(worker: Worker, serial: int, cell: int, rank_ids: RankIds = ()) -> WorkerState:
    health = worker.health
    return WorkerState(
        entry=worker.spec,
        serial=serial,
        cell=cell,
        address=worker.address,
        state=health.state,
        last_error=health.last_error,
        failed=health.failed_requests > 0,
        breaker_tripped=health.breaker_tripped,
        half_open_taken=health.breaker_tripped and health.half_open_id != 0,
        half_open_count=health.half_open_count,
        cordon_reasons=tuple(sorted(worker.cordon_reasons)),
        label=worker.weight_version.label,
        epoch=worker.weight_version.epoch,
        hop_line=worker.hop_line,
        reported_role=worker.reported_role,
        reported_ranks=worker.reported_ranks,
        rank_ids=rank_ids,
        reported_adapters=worker.reported_adapters,
        reported_bootstrap_port=worker.reported_bootstrap_port,
    )


def apply_state(worker: Worker, state: WorkerState) -> bool:
    """Apply all fields except the spec and the half-open request. Returns whether picks or requests
    may change."""
    health = worker.health
    before = (
        health.state,
        health.breaker_tripped,
        worker.cordon_reasons,
        worker.weight_version,
        worker.hop_line,
        worker.reported_ranks,
    )
    worker.reported_ranks = state.reported_ranks
    role_changed = worker.report_role(state.reported_role)
    adapters_changed = worker.report_adapters(state.reported_adapters)
    port_changed = worker.report_bootstrap_port(state.reported_bootstrap_port)
    worker.hop_line = state.hop_line
    worker.address = state.address
    worker.cordon_reasons = set(state.cordon_reasons)
    if (worker.weight_version.label, worker.weight_version.epoch) != (state.label, state.epoch):
        worker.weight_version = WeightVersion(state.label, state.epoch)
    health.state = state.state
    health.last_error = state.last_error
    health.failed_requests = int(state.failed)
    health.breaker_tripped = state.breaker_tripped
    now = (
        health.state,
        health.breaker_tripped,
        worker.cordon_reasons,
        worker.weight_version,
        worker.hop_line,
        worker.reported_ranks,
    )
    return role_changed or adapters_changed or port_changed or before != now
