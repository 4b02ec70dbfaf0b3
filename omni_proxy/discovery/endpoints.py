"""The workers of one source of discovery, by identity, and the status of the source.

Invariants: a worker that has been open is removed only through `LEAVING`, so that its requests can
end; a worker that was never ready is not visible outside. A worker with the same URL but another
identity is another worker. `error` is set if and only if the latest attempt failed. Pure: times are
arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from omni_proxy.config.overlay import FoundWorker


class DiscoveryState(Enum):
    PENDING = "pending"  # never ready so far: not visible yet
    OPEN = "open"
    NOT_READY = "not_ready"  # was ready before; gets no new requests until it is ready again
    LEAVING = "leaving"  # gets no new requests, and is removed once it is idle


@dataclass(frozen=True, slots=True)
class ReportedEndpoint:
    """A worker as its source reports it now."""

    found: FoundWorker
    ready: bool


@dataclass(slots=True, eq=False)
class SourceEndpoint:
    found: FoundWorker
    state: DiscoveryState
    since: float  # start of its state
    reason: str = ""  # for a state in which it gets no requests

    @property
    def url(self) -> str:
        return self.found.entry.url

    @property
    def uid(self) -> str:
        return self.found.discovered.uid


class SourceEndpoints:
    """`put` and `replace` apply a change at time `now`, and return the endpoints whose state or
    settings changed."""

    def __init__(self) -> None:
        self._by_uid: dict[str, dict[str, SourceEndpoint]] = {}  # then by URL

    def __iter__(self) -> Iterator[SourceEndpoint]:
        return (endpoint for endpoints in self._by_uid.values() for endpoint in endpoints.values())

    def get(self, uid: str, url: str) -> SourceEndpoint | None:
        return self._by_uid.get(uid, {}).get(url)

    def put(
        self, uid: str, endpoints: Sequence[ReportedEndpoint], reason: str, now: float
    ) -> list[SourceEndpoint]:
        """Set the endpoints of `uid`; its other endpoints leave, for the `reason`."""
        known = self._by_uid.setdefault(uid, {})
        changed = [
            endpoint
            for reported in endpoints
            if (endpoint := self._put_one(known, reported, reason, now)) is not None
        ]
        changed += self._retire(
            known, {reported.found.entry.url for reported in endpoints}, reason, now
        )
        if not known:
            del self._by_uid[uid]
        return changed

    def replace(
        self, endpoints: Mapping[str, Sequence[ReportedEndpoint]], reason: str, now: float
    ) -> list[SourceEndpoint]:
        """Set all endpoints, by uid."""
        changed = []
        for uid in [uid for uid in self._by_uid if uid not in endpoints]:
            changed += self.put(uid, (), reason, now)
        for uid, reported in endpoints.items():
            changed += self.put(uid, reported, reason, now)
        return changed

    def forget(self, endpoint: SourceEndpoint) -> None:
        """Remove an endpoint that has left."""
        endpoints = self._by_uid.get(endpoint.uid, {})
        if endpoints.get(endpoint.url) is endpoint:
            del endpoints[endpoint.url]
            if not endpoints:
                del self._by_uid[endpoint.uid]

    def leaving(self) -> list[SourceEndpoint]:
        return [endpoint for endpoint in self if endpoint.state is DiscoveryState.LEAVING]

    def _put_one(
        self, known: dict[str, SourceEndpoint], reported: ReportedEndpoint, reason: str, now: float
    ) -> SourceEndpoint | None:
        """The endpoint, if it changed."""
        found, url = reported.found, reported.found.entry.url
        endpoint = known.get(url)
        if endpoint is None:
            state = DiscoveryState.OPEN if reported.ready else DiscoveryState.PENDING
            endpoint = known[url] = SourceEndpoint(found, state, now)
            return endpoint if reported.ready else None
        before = endpoint.state
        if reported.ready:
            state = DiscoveryState.OPEN
        else:
            state = (
                DiscoveryState.PENDING
                if before is DiscoveryState.PENDING
                else DiscoveryState.NOT_READY
            )
        if state is before and found.is_as(endpoint.found):
            return None
        if not found.is_as(endpoint.found):
            endpoint.found = found
        if state is not before:
            endpoint.state, endpoint.since = state, now
        endpoint.reason = reason if state is DiscoveryState.NOT_READY else ""
        return None if state is DiscoveryState.PENDING else endpoint

    def _retire(
        self, known: dict[str, SourceEndpoint], present: set[str], reason: str, now: float
    ) -> list[SourceEndpoint]:
        """Members whose URL is not in `present` leave."""
        changed = []
        for url in [url for url in known if url not in present]:
            endpoint = known[url]
            if endpoint.state is DiscoveryState.PENDING:
                del known[url]
            elif endpoint.state is not DiscoveryState.LEAVING:
                endpoint.state, endpoint.since, endpoint.reason = (
                    DiscoveryState.LEAVING,
                    now,
                    reason,
                )
                changed.append(endpoint)
        return changed


def combine(sources: Iterable[SourceEndpoints]) -> tuple[FoundWorker, ...]:
    """One worker for each URL: a worker that stays takes precedence over one that leaves, then the
    first source, then the newest worker. Ordered by source, then in order of discovery."""
    chosen: dict[str, tuple[int, SourceEndpoint]] = {}
    for number, endpoints in enumerate(sources):
        for endpoint in endpoints:
            if endpoint.state is DiscoveryState.PENDING:
                continue
            url = endpoint.found.entry.url
            other = chosen.get(url)
            if other is None or _replaces(endpoint, number, *other):
                chosen[url] = number, endpoint
    return tuple(endpoint.found for _, endpoint in chosen.values())


def _replaces(
    endpoint: SourceEndpoint, number: int, other_number: int, other: SourceEndpoint
) -> bool:
    leaves, other_leaves = (one.state is DiscoveryState.LEAVING for one in (endpoint, other))
    if leaves != other_leaves:
        return other_leaves
    return number == other_number and endpoint.uid != other.uid


@dataclass(slots=True)
class SourceStatus:
    name: str
    kind: str
    listed_at: datetime | None = None  # of its last complete list or answer
    last_event_at: datetime | None = None  # the same, or of the last event
    error: str = ""
    failing_since: datetime | None = None
    failures: int = 0
    lists: int = 0
    events: Counter[str] = field(default_factory=Counter)  # by type

    def listed(self, now: datetime) -> None:
        self.lists += 1
        self.listed_at = now
        self.received(now)

    def received(self, now: datetime, event: str = "") -> None:
        """A list, an answer or an event was received. `event`: its type, or ""."""
        self.last_event_at = now
        self.error, self.failing_since = "", None
        if event:
            self.events[event] += 1

    def failed(self, error: str, now: datetime) -> bool:
        """An attempt failed; returns whether the error is a new one."""
        self.failures += 1
        self.failing_since = self.failing_since or now
        before, self.error = self.error, error
        return error != before

    @property
    def state(self) -> str:
        """`stale`: it fails, and the workers are those of the last list."""
        if not self.error:
            return "synced" if self.listed_at else "starting"
        return "stale" if self.listed_at else "failing"


@dataclass(frozen=True, slots=True)
class SourceReport:
    """A source, the number of its workers by state, and problems by pod name or address."""

    status: SourceStatus
    workers: dict[str, int]
    problems: dict[str, str]


def count_states(endpoints: Iterable[SourceEndpoint]) -> dict[str, int]:
    counts = Counter(endpoint.state.value for endpoint in endpoints)
    return {state.value: counts[state.value] for state in DiscoveryState}
