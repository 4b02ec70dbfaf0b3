"""What screens and charts show of a proxy of a cluster beside its counts, as it tells the others.

Invariant: bounded: a message has the figures of a part of the workers, of `MOST_WORKERS` in all,
and what is known of a member goes with it. Counts are of the time since the member's last message,
so what a lost message had is missing in charts, and nothing else depends on it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from msgspec import Struct

FIGURES_SECS: Final = 1.0
PARTS: Final = 5  # of the workers, by their keys: each is told of every five seconds
MOST_WORKERS: Final = 512


class WorkerFigures(NamedTuple):
    """Of a worker's last minute, through one proxy."""

    requests_per_sec: float = 0.0
    errors: int = 0
    output_tokens_per_sec: float = 0.0


class CountedFigures(Struct, frozen=True, array_like=True):
    """What was counted since the last message, by the names of `telemetry.history.rings.Bin`, as
    are `firsts` and `gaps` by its buckets."""

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
    """`dashboard`: its URL, "" for none that others reach. `errors`: of the last minute, the rates
    of the last ten seconds. `workers`: of `part`, by key, those without any left out."""

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
    """By member, of the others."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}

    def take(self, member: str, figures: ProxyFigures) -> None:
        known = self._members.setdefault(member, _Member(figures))
        known.figures = figures
        if 0 <= figures.part < PARTS and len(figures.workers) <= MOST_WORKERS:
            known.parts[figures.part] = figures.workers

    def keep(self, members: Iterable[str]) -> None:
        """Forget all others."""
        for name in self._members.keys() - set(members):
            del self._members[name]

    def of(self, member: str) -> ProxyFigures | None:
        known = self._members.get(member)
        return known.figures if known is not None else None

    @property
    def waiting(self) -> int:
        return sum(known.figures.waiting for known in self._members.values())

    def elsewhere(self, key: int) -> WorkerFigures:
        """Of a worker, the sum over all others."""
        found = [
            figures
            for known in self._members.values()
            if (figures := known.parts.get(key % PARTS, {}).get(key)) is not None
        ]
        if not found:
            return WorkerFigures()
        rates, errors, tokens = zip(*found, strict=True)
        return WorkerFigures(sum(rates), sum(errors), sum(tokens))
