"""A sliding window: at most `limit` in any 60 s, counted in cells that several processes may share.

Time is cut into buckets of half a second. What was taken in the last WINDOW buckets, the present
one and the oldest one as a whole, is never above the limit; any 60 s touch no more buckets than
that. So the bound holds for any 60 s, and what was taken is free again after 60 to 60.5 s, whatever
the limit is. Memory is fixed: one ring of counts for each process, each written by its own process
alone. A process that shares a window counts itself first and reads the others then: of two in one
moment at least one sees the other and steps back. Pure: the time is an argument, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Final, Protocol

WINDOW_SECS: Final = 60
PER_SEC: Final = 2  # buckets
WINDOW: Final = WINDOW_SECS * PER_SEC + 1  # buckets that any 60 s may touch
RING: Final = 256  # so a process that clears old cells touches none that another one reads
WINDOW_CELLS: Final = RING + 1  # the number of the newest bucket, then the ring
FRESH: Final = 4  # newest buckets: of other processes they are read each time


class Cells(Protocol):
    """A list, or memory that processes share. All values are zero or above."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, value: int, /) -> None: ...


def no_fence() -> None:
    """Where no other process counts."""


class RateWindow:
    """`cells`: `WINDOW_CELLS` of this process, from index `at` on. They may hold earlier counts."""

    __slots__ = (
        "_at", "_cells", "_closed", "_ends_at", "_fence", "_others", "_place", "_tries", "bucket",
        "total",
    )  # fmt: skip

    def __init__(self, cells: Cells, at: int = 0) -> None:
        self._cells = cells
        self._at = at + 1  # of the ring
        self._others: Sequence[Cells] = ()
        self._fence: Callable[[], None] = no_fence
        self.bucket = cells[at]  # the number of the bucket that counts now
        self._place = self._at + self.bucket % RING  # of its cell
        self._ends_at = 0.0  # its end, or earlier
        self.total = self._sum(cells, self.bucket)  # of this process, in the present window
        self._tries = 1
        self._closed = 0  # of other processes, before the FRESH buckets

    def share_with(
        self, others: Sequence[Cells], fence: Callable[[], None], tries: int = 3
    ) -> None:
        """The same cells of other processes. `fence`: all see what was written before it. `tries`:
        where processes step back for each other; another number in each, so that one gets in."""
        self._others = others
        self._fence = fence
        self._tries = tries
        self._closed = self._sum_closed()

    def take(self, amount: int, limit: int, now: float) -> bool:
        """Count `amount`, unless that would be above the limit. `bucket` is then where."""
        if now >= self._ends_at:
            self._follow(now)
        if self._others:
            return self._take_shared(amount, limit)
        total = self.total + amount
        if total > limit:
            return False
        self.total = total
        self._cells[self._place] += amount
        return True

    def add(self, amount: int) -> None:
        """Count what was taken in the present bucket, where that is known to fit."""
        self.total += amount
        self._cells[self._place] += amount

    def _take_shared(self, amount: int, limit: int) -> bool:
        for _ in range(self._tries):
            newest = self._newest()
            if newest > self.bucket:
                self._advance(newest)
            if self._total() + amount > limit:
                return False
            self.add(amount)
            self._fence()
            late = self._newest() >= self.bucket + FRESH
            if not late and self._total() <= limit:
                return True
            self.add(-amount)
        return False

    def settle(self, taken: int, bucket: int, actual: int, now: float) -> None:
        """`taken` in `bucket` turned out to be `actual`: less goes back to where it was taken, more
        is counted now, above the limit if need be."""
        if now >= self._ends_at:
            self._follow(now)
        more = actual - taken
        if more >= 0:
            self.total += more
            self._cells[self._place] += more
        elif bucket > self.bucket - WINDOW:
            self.total += more
            self._cells[self._at + bucket % RING] += more

    def used(self, now: float) -> int:
        if now >= self._ends_at:
            self._follow(now)
        return self._total() if self._others else self.total

    def reset_state(self, now: float) -> tuple[int, float]:
        """The whole seconds until all of it is free again, and until when that stays so: `now`
        where that is not known, as others may take something."""
        reset = self.reset_secs(now)
        if self._others or not self._cells[self._place]:
            return reset, now
        free_at = (self.bucket + WINDOW) / PER_SEC
        return reset, min(self._ends_at, free_at - reset + 1)

    def wait_secs(self, amount: int, limit: int, now: float) -> int:
        """Whole seconds, at least one, until `amount` fits if nothing else is taken meanwhile."""
        excess = self.used(now) + amount - limit
        number = self.bucket
        for oldest in range(number - WINDOW + 1, number + 1):
            if excess <= 0:
                number = oldest - 1
                break
            excess -= self._count_at(oldest)
        return max(1, ceil((number + WINDOW) / PER_SEC - now))

    def reset_secs(self, now: float) -> int:
        """Whole seconds until all of it is free again."""
        self.used(now)
        for newest in range(self.bucket, self.bucket - WINDOW, -1):
            if self._count_at(newest):
                return max(0, ceil((newest + WINDOW) / PER_SEC - now))
        return 0

    def rows(self, now: float) -> tuple[tuple[int, int], ...]:
        """What counts now, over all processes: numbers of buckets, and how much was taken."""
        self.used(now)
        counts = [(each, self._count_at(each)) for each in self._numbers()]
        return tuple((number, count) for number, count in counts if count)

    def restore(self, rows: Iterable[tuple[int, int]], now: float) -> None:
        """Count what another program has counted, by the same clock."""
        self.used(now)
        for number, count in rows:
            if number in self._numbers() and count > 0:
                self.total += count
                self._cells[self._at + number % RING] += count

    def _numbers(self) -> range:
        """The buckets of the present window."""
        return range(max(0, self.bucket - WINDOW + 1), self.bucket + 1)

    def _count_at(self, number: int) -> int:
        """Over all processes."""
        at = self._at + number % RING
        return sum(
            cells[at]
            for cells in (self._cells, *self._others)
            if number <= cells[self._at - 1] < number + RING
        )

    def _newest(self) -> int:
        """The newest bucket of any other process."""
        at = self._at - 1
        return max([cells[at] for cells in self._others])

    def _total(self) -> int:
        at, total, first = self._at, self.total + self._closed, self.bucket - FRESH + 1
        for cells in self._others:
            for number in range(first, cells[at - 1] + 1):
                total += cells[at + number % RING]
        return total

    def _sum_closed(self) -> int:
        return sum([self._sum(cells, self.bucket - FRESH) for cells in self._others])

    def _sum(self, cells: Cells, last: int) -> int:
        """Of one process, in the present window up to bucket `last`."""
        at, newest = self._at, cells[self._at - 1]
        first = max(0, self.bucket - WINDOW + 1, newest - RING + 1)
        last = min(last, newest)
        return sum([cells[at + each % RING] for each in range(first, last + 1)])

    def _follow(self, now: float) -> None:
        number = int(now * PER_SEC)
        if number > self.bucket:
            self._advance(number)
        self._ends_at = (self.bucket + 1) / PER_SEC

    def _advance(self, number: int) -> None:
        """The buckets up to `number` begin, empty."""
        cells, at = self._cells, self._at
        for each in range(max(self.bucket + 1, number - RING + 1), number + 1):
            cells[at + each % RING] = 0
        self.bucket = cells[at - 1] = number
        self._place = at + number % RING
        self.total = self._sum(cells, number)
        self._closed = self._sum_closed()
