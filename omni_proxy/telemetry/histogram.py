"""Histograms that cost a bisect and two additions per value, or less for many values at once.

Invariant: `counts` has one entry per bound and one for values above the last; a bound belongs to
the bucket below it, as in Prometheus. Bounds are in seconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

# What the metrics of other gateways use, so that dashboards can be compared.
DURATION: Final = tuple(0.01 * 2**n for n in range(14))
FIRST_CHUNK: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
)  # fmt: skip
BETWEEN_CHUNKS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
LONGEST_GAP: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SHORT: Final = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0,
)  # fmt: skip
# For quantiles: four per octave, so that an estimate is at most 19 % off. The bounds of the times
# that most answers share are among them, so that one search serves all of those.
_OCTAVES: Final = tuple(0.00025 * 2 ** (n / 4) for n in range(89))
FINE: Final[tuple[float, ...]] = tuple(sorted({*FIRST_CHUNK, *DURATION, *_OCTAVES}))
# For each bucket of FINE, its bucket of DURATION.
COARSE: Final = (*(bisect_left(DURATION, bound) for bound in FINE), len(DURATION))


class Histogram:
    """A caller that counts many values may inline it, as `telemetry` does."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, secs: float) -> None:
        self.counts[bisect_left(self.bounds, secs)] += 1
        self.sum += secs

    def observe_all(self, values: list[float]) -> None:
        """As `telemetry` does each of them, for a tenth of its price; `many` is empty then."""
        self.sum += sum(values)
        values.sort()
        below = 0
        first = bisect_left(self.bounds, values[0]) if values else len(self.bounds)
        for index in range(first, len(self.bounds)):
            upto = bisect_right(values, self.bounds[index], below)
            self.counts[index] += upto - below
            below = upto
            if below == len(values):
                break
        self.counts[-1] += len(values) - below
        values.clear()

    def clear(self) -> None:
        """In place: counting continues."""
        self.counts[:] = [0] * len(self.counts)
        self.sum = 0.0

    def buckets(self, bounds: tuple[float, ...] = ()) -> list[tuple[str, float]]:
        """As an exposition has them: upper bound as text, and how many lie at or below it.

        `bounds`: only these of the bounds.
        """
        bounds_shown = frozenset(bounds or self.bounds)
        rows: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            if bound in bounds_shown:
                rows.append((f"{bound:.10g}", below))
        return [*rows, ("+Inf", below + self.counts[-1])]


class LateHistogram(Histogram):
    """Writers append values to `late`, always the same list, and merge them when there are many;
    readers merge first."""

    __slots__ = ("_counts", "_sum", "late")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.late: list[float] = []
        super().__init__(bounds)

    @property
    def counts(self) -> list[int]:
        if self.late:
            self.sort_in()
        return self._counts

    @counts.setter
    def counts(self, counts: list[int]) -> None:
        self._counts = counts

    @property
    def sum(self) -> float:
        if self.late:
            self.sort_in()
        return self._sum

    @sum.setter  # noqa: A003  as the base has it
    def sum(self, total: float) -> None:
        self._sum = total

    def sort_in(self) -> None:
        values = self.late[:]
        self.late.clear()
        self.observe_all(values)

    def clear(self) -> None:
        self.late.clear()
        super().clear()


def quantile(counts: Sequence[int], share: float, bounds: tuple[float, ...] = FINE) -> float | None:
    """Of values counted by their index in `bounds`; None without values."""
    target = sum(counts) * share
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= target:
            low = bounds[index - 1] if index else 0.0
            high = bounds[min(index, len(bounds) - 1)]
            return low + (high - low) * (target - below) / count
        below += count
    return None
