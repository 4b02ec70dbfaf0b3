"""One worker: its configuration, its state and its counters.

Invariant: `routable` is true exactly while the worker is healthy, enabled, not cordoned and has no
half-open request in flight. The data plane reads and counts here on its hot path; membership and
health change only through `Fleet`. Must not do I/O, read a clock or make JSON.

A traffic class has the same offset in the counters of every worker for as long as the process runs.
The counters are one flat list: a dict of objects would touch many cache lines per request.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.url import dial_address, display_id, worker_id
from omni_proxy.fleet.capabilities import capability_mask
from omni_proxy.fleet.health import Health, HealthMachine
from omni_proxy.fleet.weight_version import UNKNOWN_VERSION, WeightVersion

# With only these cordon reasons a worker is healthy: just its weights are in question.
WEIGHT_CORDONS: Final = frozenset(("updating", "paused", "uncertain", "catching_up", "unproven"))
LAUNCH_CORDON: Final = "launch"  # the process that the proxy starts for it is not ready

CLASSES: Final = 16  # at most so many traffic classes
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
    """Counts of one kind by traffic class, classes without any left out."""
    return {
        traffic: counts[offset + kind]
        for traffic, offset in _offsets.items()
        if counts[offset + kind]
    }


class _RequestFields:
    """Fields that every request touches. The slots of a base class come first in memory, so these
    share cache lines."""

    __slots__ = (
        "api_key_env",
        "counts",
        "health",
        "in_flight",
        "peak_in_flight",
        "route_line",
        "version",
    )


class Worker(_RequestFields):
    """A server behind a base URL. `in_flight` counts exchanges until their last byte."""

    __slots__ = (
        "address",
        "capabilities",
        "cordon_reasons",
        "disabled",
        "disabled_changed_at",
        "display_id",
        "health_body",
        "hop_line",
        "id",
        "instance",
        "mask",
        "max_inflight",
        "model",
        "origin",
        "registered_at",
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
        self.in_flight = 0
        self.peak_in_flight = 0
        self.cordon_reasons: set[str] = set()
        self.health_body: object = None
        self.instance = ""  # process identity from its last good probe
        self.hop_line = b""  # header line for a worker that is a proxy, see `wire.proxy_headers`
        self.version: WeightVersion = UNKNOWN_VERSION
        self.counts = zero_counters()
        self.configure(spec)

    def configure(self, spec: WorkerSpec) -> None:
        """Take over the settings of a spec with the same URL; health, counts and connections
        stay."""
        self.model = spec.model
        self.capabilities = spec.capabilities
        self.mask = capability_mask(spec.capabilities)
        self.disabled = spec.disabled
        self.weight = spec.weight
        self.max_inflight = spec.max_inflight
        self.origin = spec.origin
        self.api_key_env = spec.api_key_env
        self.tls_ca = spec.tls_ca
        self.tls_verify = spec.tls_verify

    def matches(self, spec: WorkerSpec) -> bool:
        """Whether `configure(spec)` would change nothing."""
        return (
            self.model == spec.model
            and self.capabilities == spec.capabilities
            and self.disabled == spec.disabled
            and self.weight == spec.weight
            and self.max_inflight == spec.max_inflight
            and self.origin == spec.origin
            and self.api_key_env == spec.api_key_env
            and self.tls_ca == spec.tls_ca
            and self.tls_verify == spec.tls_verify
        )

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
        """Attempts that ended well, by traffic class."""
        return counts_by_class(self.counts, SUCCEEDED)

    @property
    def failed(self) -> dict[str, int]:
        """Attempts that failed, by traffic class."""
        return counts_by_class(self.counts, FAILED)

    @property
    def weight_version(self) -> str | None:
        """The label of its weights, None if unknown."""
        return self.version.label

    @property
    def weight_epoch(self) -> int:
        """The proxy's own number of its weights; 0: not from an update through the proxy."""
        return self.version.epoch

    @property
    def routable(self) -> bool:
        health = self.health
        healthy = health.state is Health.HEALTHY and not health.half_open_id
        return healthy and not self.disabled and not self.cordon_reasons
