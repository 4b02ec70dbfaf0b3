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


class Standing(Enum):
    PENDING = "pending"  # not ready yet: no worker so far
    OPEN = "open"
    NOT_READY = "not_ready"  # it was ready; gets no new requests until it is again
    LEAVING = "leaving"  # gets no new requests, and is forgotten once it is idle


@dataclass(frozen=True, slots=True)
class Sighting:
    """A worker as its source describes it now."""

    found: FoundWorker
    ready: bool


@dataclass(slots=True, eq=False)
class SourceMember:
    found: FoundWorker
    standing: Standing
    since: float  # of its standing
    reason: str = ""  # of a standing that keeps requests away

    @property
    def url(self) -> str:
        return self.found.entry.url

    @property
    def uid(self) -> str:
        return self.found.discovered.uid


class SourceMembers:
    """Each method is one change at time `now`, and returns the members whose standing or settings
    it changed."""

    def __init__(self) -> None:
        self._by_uid: dict[str, dict[str, SourceMember]] = {}  # then by URL

    def __iter__(self) -> Iterator[SourceMember]:
        return (member for members in self._by_uid.values() for member in members.values())

    def get(self, uid: str, url: str) -> SourceMember | None:
        return self._by_uid.get(uid, {}).get(url)

    def put(
        self, uid: str, sightings: Sequence[Sighting], reason: str, now: float
    ) -> list[SourceMember]:
        """All that there is of `uid` now; `reason`: why the others of it leave."""
        known = self._by_uid.setdefault(uid, {})
        changed = [
            member
            for sighting in sightings
            if (member := self._put_one(known, sighting, reason, now)) is not None
        ]
        changed += self._retire(known, {each.found.entry.url for each in sightings}, reason, now)
        if not known:
            del self._by_uid[uid]
        return changed

    def replace(
        self, sightings: Mapping[str, Sequence[Sighting]], reason: str, now: float
    ) -> list[SourceMember]:
        """All that there is, by uid."""
        changed = []
        for uid in [uid for uid in self._by_uid if uid not in sightings]:
            changed += self.put(uid, (), reason, now)
        for uid, seen in sightings.items():
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
        return [member for member in self if member.standing is Standing.LEAVING]

    def _put_one(
        self, known: dict[str, SourceMember], sighting: Sighting, reason: str, now: float
    ) -> SourceMember | None:
        """The member, if it is changed."""
        found, url = sighting.found, sighting.found.entry.url
        member = known.get(url)
        if member is None:
            standing = Standing.OPEN if sighting.ready else Standing.PENDING
            member = known[url] = SourceMember(found, standing, now)
            return member if sighting.ready else None
        before = member.standing
        if sighting.ready:
            standing = Standing.OPEN
        else:
            standing = Standing.PENDING if before is Standing.PENDING else Standing.NOT_READY
        if standing is before and found.is_as(member.found):
            return None
        if not found.is_as(member.found):
            member.found = found
        if standing is not before:
            member.standing, member.since = standing, now
        member.reason = reason if standing is Standing.NOT_READY else ""
        return None if standing is Standing.PENDING else member

    def _retire(
        self, known: dict[str, SourceMember], present: set[str], reason: str, now: float
    ) -> list[SourceMember]:
        """Those whose URL is not `present` leave."""
        changed = []
        for url in [url for url in known if url not in present]:
            member = known[url]
            if member.standing is Standing.PENDING:
                del known[url]
            elif member.standing is not Standing.LEAVING:
                member.standing, member.since, member.reason = Standing.LEAVING, now, reason
                changed.append(member)
        return changed


def combine(sources: Iterable[SourceMembers]) -> tuple[FoundWorker, ...]:
    """One worker for each URL: one that stays before one that leaves, then the first source's, then
    the newest. The order is that of the sources, then that in which workers were found."""
    chosen: dict[str, tuple[int, SourceMember]] = {}
    for number, members in enumerate(sources):
        for member in members:
            if member.standing is Standing.PENDING:
                continue
            url = member.found.entry.url
            other = chosen.get(url)
            if other is None or _replaces(member, number, *other):
                chosen[url] = number, member
    return tuple(member.found for _, member in chosen.values())


def _replaces(member: SourceMember, number: int, other_number: int, other: SourceMember) -> bool:
    leaves, other_leaves = (each.standing is Standing.LEAVING for each in (member, other))
    if leaves != other_leaves:
        return other_leaves
    return number == other_number and member.uid != other.uid
