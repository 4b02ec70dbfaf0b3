"""A sliding window: at most `limit` in any 60 s, counted in cells that several processes may share.

Time is divided into buckets of half a second. The sum over the last WINDOW buckets never exceeds
the limit, and any 60 s overlap at most as many buckets; so the limit holds for any 60 s, and an
amount is free again after 60 to 60.5 s. Memory is fixed: one ring of counts per process, written
only by that process. With a shared window a process first adds its own amount, then reads the
others: of two at the same moment at least one sees the other and undoes its addition. Pure: the
time is an argument, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Final, Protocol

WINDOW_SECS: Final = 60
PER_SEC: Final = 2  # buckets
WINDOW: Final = WINDOW_SECS * PER_SEC + 1  # buckets that any 60 s may overlap
RING: Final = 256  # large enough that cells being cleared are not read by other processes
WINDOW_CELLS: Final = RING + 1  # the number of the newest bucket, then the ring
FRESH: Final = 4  # newest buckets: those of other processes are read each time


class Cells(Protocol):
    """A list, or memory that processes share. All values are zero or above."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


def no_fence() -> None:
    """For windows that are not shared."""


class RateWindow:
    """`cells`: `WINDOW_CELLS` of this process, from index `start` on, maybe with earlier counts."""

    __slots__ = (
        "_cells", "_closed", "_ends_at", "_fence", "_others", "_place", "_ring_start", "_tries",
        "bucket", "total",
    )  # fmt: skip

    def __init__(self, cells: Cells, start: int = 0) -> None:
        self._cells = cells
        self._ring_start = start + 1
        self._others: Sequence[Cells] = ()
        self._fence: Callable[[], None] = no_fence
        self.bucket = cells[start]  # number of the present bucket
        self._place = self._ring_start + self.bucket % RING  # index of its cell
        self._ends_at = 0.0  # its end, or earlier
        self.total = self._sum(cells, self.bucket)  # of this process, in the present window
        self._tries = 1
        self._closed = 0  # sum of other processes' buckets before the FRESH ones

    def share_with(
        self, others: Sequence[Cells], fence: Callable[[], None], tries: int = 3
    ) -> None:
        """Share the window with the cells of other processes. `fence`: a memory barrier. `tries`:
        attempts when processes undo their additions because of each other; the number should differ
        between processes, so that one succeeds."""
        self._others = others
        self._fence = fence
        self._tries = tries
        self._closed = self._sum_closed()

    def take(self, amount: int, limit: int, now: float) -> bool:
        """Add `amount` to the present bucket, unless the limit would be exceeded."""
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
        """Add `amount` to the present bucket; the caller knows that it fits."""
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

    def settle(self, reserved: int, bucket: int, actual: int, now: float) -> None:
        """Replace `reserved` in `bucket` by `actual`: an excess is subtracted from that bucket, a
        shortfall is added to the present one, even above the limit."""
        if now >= self._ends_at:
            self._follow(now)
        more = actual - reserved
        if more >= 0:
            self.total += more
            self._cells[self._place] += more
        elif bucket > self.bucket - WINDOW:
            self.total += more
            self._cells[self._ring_start + bucket % RING] += more

    def used(self, now: float) -> int:
        if now >= self._ends_at:
            self._follow(now)
        return self._total() if self._others else self.total

    def reset_state(self, now: float) -> tuple[int, float]:
        """Whole seconds until all of the limit is free again, and until when this number is valid:
        `now` if that is unknown, as others may add something."""
        reset = self.reset_secs(now)
        if self._others or not self._cells[self._place]:
            return reset, now
        free_at = (self.bucket + WINDOW) / PER_SEC
        return reset, min(self._ends_at, free_at - reset + 1)

    def wait_secs(self, amount: int, limit: int, now: float) -> int:
        """Whole seconds, at least one, until `amount` fits if nothing else is added."""
        excess = self.used(now) + amount - limit
        number = self.bucket
        for oldest in range(number - WINDOW + 1, number + 1):
            if excess <= 0:
                number = oldest - 1
                break
            excess -= self._count_at(oldest)
        return max(1, ceil((number + WINDOW) / PER_SEC - now))

    def reset_secs(self, now: float) -> int:
        """Whole seconds until all of the limit is free again."""
        self.used(now)
        for newest in range(self.bucket, self.bucket - WINDOW, -1):
            if self._count_at(newest):
                return max(0, ceil((newest + WINDOW) / PER_SEC - now))
        return 0

    def rows(self, now: float) -> tuple[tuple[int, int], ...]:
        """The present window over all processes: numbers of buckets, and their counts."""
        self.used(now)
        counts = [(number, self._count_at(number)) for number in self._numbers()]
        return tuple((number, count) for number, count in counts if count)

    def restore(self, rows: Iterable[tuple[int, int]], now: float) -> None:
        """Add the counts of an old program, which used the same clock."""
        self.used(now)
        for number, count in rows:
            if number in self._numbers() and count > 0:
                self.total += count
                self._cells[self._ring_start + number % RING] += count

    def _numbers(self) -> range:
        """The buckets of the present window."""
        return range(max(0, self.bucket - WINDOW + 1), self.bucket + 1)

    def _count_at(self, number: int) -> int:
        """The count of a bucket, over all processes."""
        index = self._ring_start + number % RING
        return sum(
            cells[index]
            for cells in (self._cells, *self._others)
            if number <= cells[self._ring_start - 1] < number + RING
        )

    def _newest(self) -> int:
        """The newest bucket of any other process."""
        index = self._ring_start - 1
        return max([cells[index] for cells in self._others])

    def _total(self) -> int:
        start, total, first = self._ring_start, self.total + self._closed, self.bucket - FRESH + 1
        for cells in self._others:
            for number in range(first, cells[start - 1] + 1):
                total += cells[start + number % RING]
        return total

    def _sum_closed(self) -> int:
        return sum([self._sum(cells, self.bucket - FRESH) for cells in self._others])

    def _sum(self, cells: Cells, last: int) -> int:
        """The sum of one process in the present window, up to bucket `last`."""
        start, newest = self._ring_start, cells[self._ring_start - 1]
        first = max(0, self.bucket - WINDOW + 1, newest - RING + 1)
        last = min(last, newest)
        return sum([cells[start + number % RING] for number in range(first, last + 1)])

    def _follow(self, now: float) -> None:
        number = int(now * PER_SEC)
        if number > self.bucket:
            self._advance(number)
        self._ends_at = (self.bucket + 1) / PER_SEC

    def _advance(self, number: int) -> None:
        """Start the buckets up to `number`, with counts of 0."""
        cells, start = self._cells, self._ring_start
        for bucket in range(max(self.bucket + 1, number - RING + 1), number + 1):
            cells[start + bucket % RING] = 0
        self.bucket = cells[start - 1] = number
        self._place = start + number % RING
        self.total = self._sum(cells, number)
        self._closed = self._sum_closed()
