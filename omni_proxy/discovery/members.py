"""The workers of one source of discovery, by the identity of what was found.

Invariant: a worker that has been open leaves only by way of `LEAVING`, so that its requests can
end; one that never was ready is not seen outside. The same identity keeps its place, another one
under the same URL is another worker. Pure: times are handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from omni_proxy.config.overlay import FoundWorker


class DiscoveryState(Enum):
    PENDING = "pending"  # not ready yet: no worker so far
    OPEN = "open"
    NOT_READY = "not_ready"  # it was ready; gets no new requests until it is again
    LEAVING = "leaving"  # gets no new requests, and is forgotten once it is idle


@dataclass(frozen=True, slots=True)
class SourceEndpoint:
    """A worker as its source describes it now."""

    found: FoundWorker
    ready: bool


@dataclass(slots=True, eq=False)
class SourceMember:
    found: FoundWorker
    state: DiscoveryState
    since: float  # of its state
    reason: str = ""  # of a state that keeps requests away

    @property
    def url(self) -> str:
        return self.found.entry.url

    @property
    def uid(self) -> str:
        return self.found.discovered.uid


class SourceMembers:
    """Each method is one change at time `now`, and returns the members whose state or settings
    it changed."""

    def __init__(self) -> None:
        self._by_uid: dict[str, dict[str, SourceMember]] = {}  # then by URL

    def __iter__(self) -> Iterator[SourceMember]:
        return (member for members in self._by_uid.values() for member in members.values())

    def get(self, uid: str, url: str) -> SourceMember | None:
        return self._by_uid.get(uid, {}).get(url)

    def put(
        self, uid: str, endpoints: Sequence[SourceEndpoint], reason: str, now: float
    ) -> list[SourceMember]:
        """All that there is of `uid` now; `reason`: why the others of it leave."""
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
        """All that there is, by uid."""
        changed = []
        for uid in [uid for uid in self._by_uid if uid not in endpoints]:
            changed += self.put(uid, (), reason, now)
        for uid, seen in endpoints.items():
            changed += self.put(uid, seen, reason, now)
        return changed

    def forget(self, member: SourceMember) -> None:
        """It has left."""
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
        """The member, if it is changed."""
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
        """Those whose URL is not `present` leave."""
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
    """One worker for each URL: one that stays before one that leaves, then the first source's, then
    the newest. The order is that of the sources, then that in which workers were found."""
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
