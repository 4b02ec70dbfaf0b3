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
class SourceEndpoint:
    """A worker as its source reports it now."""

    found: FoundWorker
    ready: bool


@dataclass(slots=True, eq=False)
class SourceMember:
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


class SourceMembers:
    """`put` and `replace` apply a change at time `now`, and return the members whose state or
    settings changed."""

    def __init__(self) -> None:
        self._by_uid: dict[str, dict[str, SourceMember]] = {}  # then by URL

    def __iter__(self) -> Iterator[SourceMember]:
        return (member for members in self._by_uid.values() for member in members.values())

    def get(self, uid: str, url: str) -> SourceMember | None:
        return self._by_uid.get(uid, {}).get(url)

    def put(
        self, uid: str, endpoints: Sequence[SourceEndpoint], reason: str, now: float
    ) -> list[SourceMember]:
        """Set the endpoints of `uid`; its other members leave, for the `reason`."""
        known = self._by_uid.setdefault(uid, {})
        changed = [
            member
            for endpoint in endpoints
            if (member := self._put_one(known, endpoint, reason, now)) is not None
        ]
        changed += self._retire(known, {each.found.entry.url for each in endpoints}, reason, now)
        if not known:
            del self._by_uid[uid]
        return changed

    def replace(
        self, endpoints: Mapping[str, Sequence[SourceEndpoint]], reason: str, now: float
    ) -> list[SourceMember]:
        """Set all endpoints, by uid."""
        changed = []
        for uid in [uid for uid in self._by_uid if uid not in endpoints]:
            changed += self.put(uid, (), reason, now)
        for uid, seen in endpoints.items():
            changed += self.put(uid, seen, reason, now)
        return changed

    def forget(self, member: SourceMember) -> None:
        """Remove a member that has left."""
        members = self._by_uid.get(member.uid, {})
        if members.get(member.url) is member:
            del members[member.url]
            if not members:
                del self._by_uid[member.uid]

    def leaving(self) -> list[SourceMember]:
        return [member for member in self if member.state is DiscoveryState.LEAVING]

    def _put_one(
        self, known: dict[str, SourceMember], endpoint: SourceEndpoint, reason: str, now: float
    ) -> SourceMember | None:
        """The member, if it changed."""
        found, url = endpoint.found, endpoint.found.entry.url
        member = known.get(url)
        if member is None:
            state = DiscoveryState.OPEN if endpoint.ready else DiscoveryState.PENDING
            member = known[url] = SourceMember(found, state, now)
            return member if endpoint.ready else None
        before = member.state
        if endpoint.ready:
            state = DiscoveryState.OPEN
        else:
            state = (
                DiscoveryState.PENDING
                if before is DiscoveryState.PENDING
                else DiscoveryState.NOT_READY
            )
        if state is before and found.is_as(member.found):
            return None
        if not found.is_as(member.found):
            member.found = found
        if state is not before:
            member.state, member.since = state, now
        member.reason = reason if state is DiscoveryState.NOT_READY else ""
        return None if state is DiscoveryState.PENDING else member

    def _retire(
        self, known: dict[str, SourceMember], present: set[str], reason: str, now: float
    ) -> list[SourceMember]:
        """Members whose URL is not in `present` leave."""
        changed = []
        for url in [url for url in known if url not in present]:
            member = known[url]
            if member.state is DiscoveryState.PENDING:
                del known[url]
            elif member.state is not DiscoveryState.LEAVING:
                member.state, member.since, member.reason = DiscoveryState.LEAVING, now, reason
                changed.append(member)
        return changed


def combine(sources: Iterable[SourceMembers]) -> tuple[FoundWorker, ...]:
    """One worker for each URL: a worker that stays takes precedence over one that leaves, then the
    first source, then the newest worker. Ordered by source, then in order of discovery."""
    chosen: dict[str, tuple[int, SourceMember]] = {}
    for number, members in enumerate(sources):
        for member in members:
            if member.state is DiscoveryState.PENDING:
                continue
            url = member.found.entry.url
            other = chosen.get(url)
            if other is None or _replaces(member, number, *other):
                chosen[url] = number, member
    return tuple(member.found for _, member in chosen.values())


def _replaces(member: SourceMember, number: int, other_number: int, other: SourceMember) -> bool:
    leaves, other_leaves = (each.state is DiscoveryState.LEAVING for each in (member, other))
    if leaves != other_leaves:
        return other_leaves
    return number == other_number and member.uid != other.uid


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


def count_states(members: Iterable[SourceMember]) -> dict[str, int]:
    counts = Counter(member.state.value for member in members)
    return {state.value: counts[state.value] for state in DiscoveryState}
