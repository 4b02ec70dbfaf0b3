"""What is known of one source of discovery: when it was last heard, and what went wrong.

Invariant: `error` is there exactly while the newest attempt failed. Pure: times are handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from omni_proxy.discovery.members import DiscoveryState, SourceMember


@dataclass(slots=True)
class SourceStatus:
    name: str
    kind: str
    listed_at: datetime | None = None  # its last whole list or answer
    heard_at: datetime | None = None  # the same, or the last event
    error: str = ""
    failing_since: datetime | None = None
    failures: int = 0
    lists: int = 0
    events: Counter[str] = field(default_factory=Counter)  # by type

    def listed(self, now: datetime) -> None:
        self.lists += 1
        self.listed_at = now
        self.heard(now)

    def heard(self, now: datetime, event: str = "") -> None:
        """`event`: its type, "" for none."""
        self.heard_at = now
        self.error, self.failing_since = "", None
        if event:
            self.events[event] += 1

    def failed(self, error: str, now: datetime) -> bool:
        """Whether this is news."""
        self.failures += 1
        self.failing_since = self.failing_since or now
        before, self.error = self.error, error
        return error != before

    @property
    def state(self) -> str:
        """`stale`: it fails, and the workers are those of its last list."""
        if not self.error:
            return "synced" if self.listed_at else "starting"
        return "stale" if self.listed_at else "failing"


@dataclass(frozen=True, slots=True)
class SourceReport:
    """A source, its workers by state, and what it could not use, by the name of it."""

    status: SourceStatus
    workers: dict[str, int]
    problems: dict[str, str]


def count_states(members: Iterable[SourceMember]) -> dict[str, int]:
    counts = Counter(member.state.value for member in members)
    return {state.value: counts[state.value] for state in DiscoveryState}
