"""Figures of a cluster's proxies for dashboards and charts, as members publish them. Pure.

Invariant: memory is bounded: a message has the figures of a part of the workers, of at most
`MAX_WORKERS` in all, and a member's figures are dropped with the member. Counts are since the
member's last message, so a lost message leaves a gap in charts; nothing else depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from msgspec import Struct

FIGURES_SECS: Final = 1.0
PARTS: Final = 5  # workers are divided by key; each message has one part, so all take five seconds
MAX_WORKERS: Final = 512


class WorkerFigures(NamedTuple):
    """Figures of a worker over the last minute, through one proxy."""

    requests_per_sec: float = 0.0
    errors: int = 0
    output_tokens_per_sec: float = 0.0


class CountedFigures(Struct, frozen=True, array_like=True):
    """Counts since the last message, with the field names of `telemetry.history.Bin`.

    `firsts` and `gaps`: counts by bucket of that class.
    """

    requests: int = 0
    errors: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reports_tokens: bool = False
    firsts: dict[int, int] = {}
    gaps: dict[int, int] = {}


class ProxyFigures(Struct, frozen=True, array_like=True):
    """Figures of a proxy. `dashboard`: its URL, "" if it is not reachable from other machines.

    `errors`: over the last minute; rates: over the last ten seconds. `workers`: those of `part`
    with any figure above 0, by key.
    """

    version: str
    started_at: float  # Unix time
    dashboard: str
    waiting: int
    lag_ms: float
    requests_per_sec: float
    errors: int
    output_tokens_per_sec: float | None
    part: int
    workers: dict[int, WorkerFigures]
    counted: CountedFigures


@dataclass(slots=True)
class _Member:
    figures: ProxyFigures
    parts: dict[int, dict[int, WorkerFigures]] = field(default_factory=dict)


class PeerFigures:
    """Figures of the other members, by name."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}

    def take(self, member: str, figures: ProxyFigures) -> None:
        known = self._members.setdefault(member, _Member(figures))
        known.figures = figures
        if 0 <= figures.part < PARTS and len(figures.workers) <= MAX_WORKERS:
            known.parts[figures.part] = figures.workers

    def keep(self, members: Iterable[str]) -> None:
        """Drop the figures of all other members."""
        for name in self._members.keys() - set(members):
            del self._members[name]

    def of(self, member: str) -> ProxyFigures | None:
        known = self._members.get(member)
        return known.figures if known is not None else None

    @property
    def waiting(self) -> int:
        return sum(known.figures.waiting for known in self._members.values())

    def peer_figures(self, key: int) -> WorkerFigures:
        """A worker's figures, summed over the other members. `key`: its target key."""
        peers = [
            figures
            for known in self._members.values()
            if (figures := known.parts.get(key % PARTS, {}).get(key)) is not None
        ]
        if not peers:
            return WorkerFigures()
        rates, errors, tokens = zip(*peers, strict=True)
        return WorkerFigures(sum(rates), sum(errors), sum(tokens))
