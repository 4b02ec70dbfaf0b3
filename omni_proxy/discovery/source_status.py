"""The status of one source of discovery: times of its last reports, and its last error.

Invariant: `error` is set if and only if the latest attempt failed. Pure: times are arguments.
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
    listed_at: datetime | None = None  # of its last complete list or answer
    heard_at: datetime | None = None  # the same, or of the last event
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
        """A list, an answer or an event was received. `event`: its type, or ""."""
        self.heard_at = now
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
