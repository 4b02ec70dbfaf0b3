"""One worker: what was configured of it, what is known of it, what it has in flight.

Invariant: `routable` is true exactly while the worker is healthy, not disabled, held by nobody, and
no trial of it is under way. The door reads and counts here on its hot path; membership and health
change only through `Fleet`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.url import dial_address, display_id, worker_id
from omni_proxy.fleet.capabilities import capability_mask, capability_names
from omni_proxy.fleet.health import Health, HealthMachine
from omni_proxy.fleet.weight_version import UNKNOWN_VERSION, WeightVersion

# Out of routing for one of these, a worker is still well: only its weights are in question.
WEIGHT_CORDONS: Final = frozenset(("updating", "paused", "uncertain", "catching_up", "unproven"))


LAUNCH_CORDON: Final = "launch"  # the process that we start for it is not ready


class _Hot:
    """What every request touches, close together: with many workers none of it is in a cache. The
    fields of a base come first."""

    __slots__ = (
        "api_key_env",
        "counts",
        "health",
        "in_flight",
        "peak_in_flight",
        "route_line",
        "version",
    )


class Worker(_Hot):
    """A replica behind a base URL. `in_flight` counts exchanges until their last byte."""

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

    def __init__(self, entry: WorkerSpec, now: datetime) -> None:
        self.url = entry.url
        self.id = worker_id(entry.url)
        self.display_id = display_id(entry.url)
        self.route_line = f"X-SGLang-Omni-Worker: {self.id}\r\n".encode("ascii")
        self.address: tuple[str, int] | str = dial_address(entry.url)
        self.health = HealthMachine(now)
        self.registered_at = now
        self.disabled_changed_at = now  # when `disabled` came to be what it is
        self.in_flight = 0
        self.peak_in_flight = 0
        self.cordon_reasons: set[str] = set()
        self.health_body: object = None
        self.instance = ""  # what its last good probe said of the process that answers
        self.hop_line = b""  # in requests to one that is a proxy itself, see `wire.proxy_headers`
        self.version: WeightVersion = UNKNOWN_VERSION  # of its weights
        self.counts = zero_counters()  # see `fleet.worker`
        self.configure(entry)

    def configure(self, entry: WorkerSpec) -> None:
        """Take over an entry of the same URL; health, counts and connections stay."""
        self.model = entry.model
        self.capabilities = entry.capabilities
        self.mask = capability_mask(entry.capabilities)
        self.disabled = entry.disabled
        self.weight = entry.weight
        self.max_inflight = entry.max_inflight
        self.origin = entry.origin
        self.api_key_env = entry.api_key_env
        self.tls_ca = entry.tls_ca
        self.tls_verify = entry.tls_verify

    def matches(self, entry: WorkerSpec) -> bool:
        return (
            self.model == entry.model
            and self.capabilities == entry.capabilities
            and self.disabled == entry.disabled
            and self.weight == entry.weight
            and self.max_inflight == entry.max_inflight
            and self.origin == entry.origin
            and self.api_key_env == entry.api_key_env
            and self.tls_ca == entry.tls_ca
            and self.tls_verify == entry.tls_verify
        )

    def add_counts(
        self, traffic: str, *, routed: int = 0, succeeded: int = 0, failed: int = 0
    ) -> None:
        """What was counted elsewhere; the door does it itself for each try."""
        place = counter_offset(traffic)
        self.counts[place + ROUTED] += routed
        self.counts[place + SUCCEEDED] += succeeded
        self.counts[place + FAILED] += failed

    @property
    def routed(self) -> dict[str, int]:
        """Tries begun, by traffic class; as of the next two, where there were any."""
        return counts_by_class(self.counts, ROUTED)

    @property
    def succeeded(self) -> dict[str, int]:
        return counts_by_class(self.counts, SUCCEEDED)

    @property
    def failed(self) -> dict[str, int]:
        return counts_by_class(self.counts, FAILED)

    @property
    def weight_version(self) -> str | None:
        """The label it gives its weights, if it told one."""
        return self.version.label

    @property
    def weight_epoch(self) -> int:
        """Our own number of them; 0: not put there by an update of ours."""
        return self.version.epoch

    @property
    def routable(self) -> bool:
        machine = self.health
        healthy = machine.state is Health.HEALTHY and not machine.half_open_id
        return healthy and not self.disabled and not self.cordon_reasons

    def record(self) -> dict[str, object]:
        """The contract's record (omni-router.md 3), then our own fields."""
        machine = self.health
        checked = machine.last_checked_at
        return {
            "worker_id": self.id,
            "id": self.id,
            "display_id": self.display_id,
            "url": self.url,
            "model": self.model,
            "capabilities": capability_names(self.mask),
            "active_requests": self.in_flight,
            "health_state": machine.state.value,
            "disabled": self.disabled,
            "routable": self.routable,
            "consecutive_failures": machine.consecutive_failures,
            "consecutive_successes": machine.consecutive_successes,
            "routed_requests": sum(self.routed.values()),
            "successful_requests": sum(self.succeeded.values()),
            "failed_requests": sum(self.failed.values()),
            "routed_requests_by_class": self.routed,
            "successful_requests_by_class": self.succeeded,
            "failed_requests_by_class": self.failed,
            "last_status_code": machine.last_status_code,
            "last_error": machine.last_error,
            "last_checked_at": checked.isoformat() if checked else None,
            "origin": self.origin,
            "weight": self.weight,
            "max_inflight": self.max_inflight,
            "in_flight": self.in_flight,
            "peak_in_flight": self.peak_in_flight,
            "since": machine.since.isoformat(),
            "registered_at": self.registered_at.isoformat(),
            "held_by": sorted(self.cordon_reasons),
            "trial": machine.is_half_open,
            "weight_version": self.weight_version,
            "weight_epoch": self.weight_epoch,
            "health": self.health_body,
        }


# Traffic classes, and where a worker counts the tries of each.
#
# Invariant: a class has one place for as long as the program runs, the same in every worker. The
# counts of a worker lie in one flat array: of a dict with an object for each class a request touched
# seven cache lines, which with hundreds of workers are in no cache.

CLASSES: Final = 16  # at most
ROUTED, SUCCEEDED, FAILED = range(3)  # tries begun, and what those came to that are over
_KINDS: Final = 3

_places: dict[str, int] = {}


def counter_offset(traffic: str) -> int:
    """Where the counts of a class begin; ROUTED and its kin are added to it."""
    place = _places.setdefault(traffic, _KINDS * len(_places))
    assert place < _KINDS * CLASSES, f"no place is left for the traffic class {traffic}"
    return place


def zero_counters() -> list[int]:
    return [0] * (_KINDS * CLASSES)


def counts_by_class(counts: list[int], kind: int) -> dict[str, int]:
    """By class, where there is any."""
    return {
        traffic: counts[place + kind] for traffic, place in _places.items() if counts[place + kind]
    }
