"""DNS answers as workers: addresses with ports, from SRV records or a host name.

Invariant: a failed query never removes a worker. Workers are removed only after `EMPTY_ANSWERS`
consecutive answers that have no addresses or say that the name does not exist. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Final

from omni_proxy.config.fields import MAX_WEIGHT
from omni_proxy.config.overlay import Discovered, FoundWorker
from omni_proxy.config.schema import WorkerEntry
from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.config.url import normalize_url
from omni_proxy.discovery.endpoints import ReportedEndpoint, SourceEndpoint, SourceEndpoints

EMPTY_ANSWERS: Final = 3
MIN_TTL_SECS: Final = 1.0  # a TTL of 0 must not become a busy loop
ABSENT: Final = "its address is no longer in DNS"
NO_TTL: Final = float("inf")


class DnsFailure(Exception):
    """A query got no answer, so it is unknown whether the name exists."""


@dataclass(frozen=True, slots=True)
class DnsAddress:
    ip: str
    port: int
    weight: int = 1


@dataclass(frozen=True, slots=True)
class SrvRecord:
    priority: int
    weight: int
    port: int
    target: str


def preferred(records: Iterable[SrvRecord]) -> list[SrvRecord]:
    """The records with the lowest priority number, which clients must use (RFC 2782), with weights
    in lowest terms. A target of "." means that the service is not available."""
    listed = [record for record in records if record.target not in ("", ".")]
    lowest = min((record.priority for record in listed), default=0)
    chosen = [record for record in listed if record.priority == lowest]
    common = reduce(gcd, (record.weight for record in chosen), 0) or 1
    return [
        SrvRecord(record.priority, max(1, record.weight // common), record.port, record.target)
        for record in sorted(chosen, key=lambda record: (record.target, record.port))
    ]


class DnsState:
    """The workers of one source."""

    def __init__(self, entry: DiscoverEntry) -> None:
        self.endpoints = SourceEndpoints()
        self.problems: dict[str, str] = {}  # by address
        self._entry = entry
        self._empty = 0  # answers in a row

    def answered(self, addresses: Iterable[DnsAddress], now: float) -> list[SourceEndpoint]:
        """Apply an answer; returns the endpoints that changed."""
        self.problems.clear()
        endpoints: dict[str, list[ReportedEndpoint]] = {}
        for address in addresses:
            worker = self._found(address)
            if worker is not None:
                endpoints[worker.entry.url] = [ReportedEndpoint(worker, ready=True)]
        self._empty = 0 if endpoints or self.problems else self._empty + 1
        if not endpoints and self._empty < EMPTY_ANSWERS:
            return []
        return self.endpoints.replace(endpoints, ABSENT, now)

    def delay_secs(self, ttl_secs: float) -> float:
        """Seconds until the next query."""
        refresh = self._entry.refresh_secs
        return min(refresh, max(ttl_secs, MIN_TTL_SECS))

    def _found(self, address: DnsAddress) -> FoundWorker | None:
        entry = self._entry
        host = f"[{address.ip}]" if ":" in address.ip else address.ip
        try:
            url = normalize_url(f"http://{host}:{address.port}", allow_unix=False)
        except ValueError as error:
            self.problems[f"{host}:{address.port}"] = str(error)
            return None
        worker = WorkerEntry(
            url=url,
            model=entry.model,
            capabilities=entry.capabilities,
            role=entry.role,
            kv_connector=entry.kv_connector,
            bootstrap_port=0,
            weight=min(address.weight, MAX_WEIGHT),
        )
        return FoundWorker(worker, Discovered(entry.name, url))
