"""Reservations with leases: items under an id until they are released or their lease ends. Pure.

Invariant: an id has at most one reservation, and each added item is returned exactly once, by
`release`, `expire` or `take_all`. Times are arguments, in seconds of one clock.
`ReservationRecord` is the form in which an upgrade hands a reservation over to the next program.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec import Struct

Item = TypeVar("Item")
_SPARE: Final = 64  # entries of released reservations that are kept before a cleanup


class _Held(NamedTuple, Generic[Item]):
    number: int
    item: Item


class Reservations(Generic[Item]):
    def __init__(self) -> None:
        self._held: dict[str, _Held[Item]] = {}
        # A heap by lease end. Entries of released reservations stay until a cleanup.
        self._ends: list[tuple[float, int, str]] = []
        self._last = 0
        self.expired = 0  # number of expired leases since the start

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, reservation_id: str) -> bool:
        return reservation_id in self._held

    def get(self, reservation_id: str) -> Item | None:
        reservation = self._held.get(reservation_id)
        return reservation.item if reservation is not None else None

    def add(self, reservation_id: str, item: Item, ends_at: float) -> None:
        """Raises KeyError if the id is in use."""
        if reservation_id in self._held:
            raise KeyError(reservation_id)
        self._last += 1
        self._held[reservation_id] = _Held(self._last, item)
        heapq.heappush(self._ends, (ends_at, self._last, reservation_id))

    def release(self, reservation_id: str) -> Item | None:
        """Remove a reservation and return its item; None if there is no such reservation."""
        reservation = self._held.pop(reservation_id, None)
        if reservation is None:
            return None
        if len(self._ends) > 2 * len(self._held) + _SPARE:
            self._ends = [end for end in self._ends if self._is_current(end)]
            heapq.heapify(self._ends)
        return reservation.item

    def expire(self, now: float) -> list[Item]:
        """Remove reservations whose leases have ended; return their items, earliest end first."""
        items = []
        while self._ends and self._ends[0][0] <= now:
            end = heapq.heappop(self._ends)
            if self._is_current(end):
                items.append(self._held.pop(end[2]).item)
        self.expired += len(items)
        return items

    def take_all(self) -> list[Item]:
        """Remove all reservations; return their items."""
        items = [reservation.item for reservation in self._held.values()]
        self._held.clear()
        self._ends.clear()
        return items

    def rows(self) -> list[tuple[str, Item, float]]:
        """Id, item and lease end of each reservation, earliest end first."""
        current = sorted(end for end in self._ends if self._is_current(end))
        return [(name, self._held[name].item, ends_at) for ends_at, _, name in current]

    def next_end(self) -> float:
        """The time when the next lease ends; infinity if there is none."""
        while self._ends and not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else inf

    def _is_current(self, end: tuple[float, int, str]) -> bool:
        reservation = self._held.get(end[2])
        return reservation is not None and reservation.number == end[1]


class ReservationRecord(Struct, frozen=True, kw_only=True):
    """A handed-over reservation. `url`: the worker's or rank's. `path`: the request's model route.

    `ends_at`: end of the lease, by CLOCK_MONOTONIC.
    """

    reservation_id: str
    url: str
    ends_at: float
    path: str
