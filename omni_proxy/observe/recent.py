"""What happened lately: a point per second for 15 minutes, each worker's last minute, recent ends.

Invariant: everything here is bounded, whatever clients send. Pure: `tick` brings the clock, once a
second; its meters bring what has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from omni_proxy.fleet.worker import Worker
from omni_proxy.observe.histogram import FINE, merged, quantile

if TYPE_CHECKING:
    from omni_proxy.door.account import Exchange

POINTS: Final = 900
SLOT_SECS: Final = 10
SLOTS: Final = 6  # so a worker's numbers are those of its last 50 to 60 seconds
KEPT_ENDS: Final = 50
KEPT_TROUBLES: Final = 150
ENDS_PER_SECOND: Final = 5  # a busy second would push all others out
TROUBLES_PER_SECOND: Final = 30
TEXT_CHARS: Final = 200


@dataclass(slots=True)
class Slot:
    """Counts of a short time. `firsts`: how many first chunks lie at each place of FINE."""

    requests: int = 0
    errors: int = 0
    troubles: int = 0
    firsts: list[int] = field(default_factory=lambda: [0] * (len(FINE) + 1))


class Point(NamedTuple):
    """One second. `at` is Unix time; the times are milliseconds, None where no answer began."""

    at: int
    requests: int
    errors: int
    first_p50_ms: float | None
    first_p99_ms: float | None
    in_flight: int
    waiting: int


class Lately(NamedTuple):
    """A worker's last minute."""

    rate: float
    errors: int
    first_p50_ms: float | None
    first_p99_ms: float | None


class End(NamedTuple):
    """How one exchange ended. `at` is of the pump's clock."""

    at: float
    route: str
    model: str | None
    worker: str
    status: int
    end: str
    ended_by: str
    phase: str
    error: str
    attempts: int
    first_secs: float | None
    total_secs: float
    request_id: str


class Recent:
    """The door's meters count into `second` and `slots_now`, and note some of the ends."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.second = Slot()
        self.slots_now: dict[Worker | None, Slot] = {}
        self._slots: deque[tuple[float, dict[Worker | None, Slot]]] = deque(maxlen=SLOTS)
        self._slots.append((0.0, self.slots_now))
        self._ends: deque[End] = deque(maxlen=KEPT_ENDS)
        self._troubles: deque[End] = deque(maxlen=KEPT_TROUBLES)

    def open_slot(self, worker: Worker | None) -> Slot:
        slot = self.slots_now[worker] = Slot()
        return slot

    def note_end(self, mine: Exchange, worker: Worker | None) -> None:
        """Of one that went well."""
        self._ends.append(_end_of(mine, worker))

    def note_trouble(self, mine: Exchange, worker: Worker | None, slot: Slot) -> None:
        """Of one that did not; whether that is an error to count depends on whose fault it was."""
        cut = mine.outcome != "completed" and mine.status < 400 and mine.ended_by != "client"
        if cut or mine.status >= 500:
            slot.errors += 1
            self.second.errors += 1
        if self.second.troubles < TROUBLES_PER_SECOND:
            self.second.troubles += 1
            self._troubles.append(_end_of(mine, worker))

    def tick(self, at: float, in_flight: int, waiting: int) -> None:
        """A second (of Unix time `at`) is over."""
        if not self._slots[-1][0]:
            self._slots[-1] = (at - 1, self.slots_now)
        second, self.second = self.second, Slot()
        self.points.append(
            Point(int(at), second.requests, second.errors, *_firsts(second), in_flight, waiting)
        )
        if at - self._slots[-1][0] >= SLOT_SECS:
            self.slots_now = {}
            self._slots.append((at, self.slots_now))

    def of(self, worker: Worker, at: float) -> Lately:
        slots = [slot for _, each in self._slots if (slot := each.get(worker))]
        began = self._slots[0][0]
        secs = max(at - began, 1.0) if began else 1.0
        total = Slot(
            requests=sum(slot.requests for slot in slots),
            errors=sum(slot.errors for slot in slots),
            firsts=merged(slot.firsts for slot in slots),
        )
        return Lately(round(total.requests / secs, 2), total.errors, *_firsts(total))

    def ends(self) -> list[End]:
        """The newest first."""
        return sorted((*self._ends, *self._troubles), key=lambda end: end.at, reverse=True)

    def since(self, at: int) -> Iterable[Point]:
        """The points after that second, the oldest first."""
        newer = []
        for point in reversed(self.points):
            if point.at <= at:
                break
            newer.append(point)
        return reversed(newer)


def _end_of(mine: Exchange, worker: Worker | None) -> End:
    """Texts are cut: clients and workers choose them."""
    need, route = mine.need, mine.route
    model = need.model if need is not None else None
    return End(
        mine.ended_at,
        route.path if route is not None else "",
        model[:TEXT_CHARS] if model else model,
        worker.url if worker is not None else "",
        mine.status,
        mine.outcome or "cut_by_proxy",
        mine.ended_by,
        mine.phase,
        mine.error[:TEXT_CHARS],
        mine.attempts,
        mine.first_at - mine.started_at if mine.first_at else None,
        mine.ended_at - mine.started_at,
        mine.request_id[:TEXT_CHARS],
    )


def _firsts(slot: Slot) -> tuple[float | None, float | None]:
    return _ms(quantile(slot.firsts, 0.5)), _ms(quantile(slot.firsts, 0.99))


def _ms(secs: float | None) -> float | None:
    return None if secs is None else round(secs * 1000, 1)
