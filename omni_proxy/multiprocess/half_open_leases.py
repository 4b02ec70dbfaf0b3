"""Which door may begin a worker's trial: one at a time, and not for ever.

Invariant: a door gets the lease only after the one before it has acknowledged that it lost it, so
two never hold it. A door that nobody asks anything passes it on, so a worker is not kept waiting by
chance. Pure: time comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

LEASE_SECS: Final = 0.5


@dataclass(slots=True)
class _Lease:
    door: int
    since: float
    over: bool = False
    taken_back: int = 0  # the message that tells the door so; 0 while it holds the lease


class HalfOpenLeases:
    """Workers are serial numbers, doors their indexes."""

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}

    def holder(self, worker: int) -> int | None:
        lease = self._leases.get(worker)
        return lease.door if lease is not None and not lease.over else None

    def turn(
        self, owed: Collection[int], doors: Sequence[int], now: float, acked: Callable[[int], int]
    ) -> set[int]:
        """Give to those that nobody holds, for a worker that owes a trial and is not on it.

        The result: doors that are to lose one; `taken` says by which message they are told.
        """
        losing = self._ended(owed, doors, acked)
        for worker in owed if doors else ():
            lease = self._leases.get(worker)
            if lease is None:
                self._leases[worker] = _Lease(doors[0], now)
            elif lease.door not in doors:
                self._leases[worker] = _Lease(_after(lease.door, doors), now)
            elif lease.taken_back:
                if acked(lease.door) >= lease.taken_back:
                    self._leases[worker] = _Lease(_after(lease.door, doors), now)
            elif len(doors) > 1 and now - lease.since >= LEASE_SECS:
                lease.over = True
                losing.add(lease.door)
        return losing

    def _ended(
        self, owed: Collection[int], doors: Sequence[int], acked: Callable[[int], int]
    ) -> set[int]:
        """Of workers that owe none now: forgotten once the door that had the lease knows."""
        losing: set[int] = set()
        for worker, lease in list(self._leases.items()):
            if worker in owed:
                continue
            if not lease.taken_back and lease.door in doors:
                lease.over = True
                losing.add(lease.door)
            elif lease.door not in doors or acked(lease.door) >= lease.taken_back:
                del self._leases[worker]
        return losing

    def taken(self, door: int, message: int) -> None:
        """Its leases that are over are taken back, which message number `message` tells it."""
        for lease in self._leases.values():
            if lease.door == door and lease.over and not lease.taken_back:
                lease.taken_back = message


def _after(door: int, doors: Sequence[int]) -> int:
    """The next in the ring."""
    later = [other for other in sorted(doors) if other > door]
    return later[0] if later else min(doors)
