"""Histograms that cost a bisect and two additions per value, and exemplars of their buckets.

Invariant: `counts` has one entry per bound and one for values above the last; a value equal to a
bound counts in the bucket below it, as in Prometheus. Bounds are in seconds. An exemplar is the
trace of the newest sampled request in a bucket: at most one for each bucket, route and worker of
the fleet. Source: OpenMetrics 1.0, "Exemplars".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.samples import Exemplar

from omni_proxy.fleet.worker import Worker

if TYPE_CHECKING:
    from omni_proxy.dataplane.exchange.exchange import Exchange


# The bounds that other gateways use, so that dashboards can be compared.
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
# For quantiles: four per octave, so that an estimate is at most 19 % off. They include the bounds
# of FIRST_CHUNK and DURATION, so that one search finds the buckets of all three.
_OCTAVES: Final = tuple(0.00025 * 2 ** (n / 4) for n in range(89))
FINE: Final[tuple[float, ...]] = tuple(sorted({*FIRST_CHUNK, *DURATION, *_OCTAVES}))
# For each bucket of FINE, its bucket of DURATION.
COARSE: Final = (*(bisect_left(DURATION, bound) for bound in FINE), len(DURATION))


class Histogram:
    """A histogram of times in seconds. Hot callers inline `observe`, as `Metrics` does."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, secs: float) -> None:
        self.counts[bisect_left(self.bounds, secs)] += 1
        self.sum += secs

    def observe_all(self, values: list[float]) -> None:
        """Count all values, much faster than one by one. Sorts and then empties `values`."""
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
        """Reset to zero in place, so that references to `counts` stay valid."""
        self.counts[:] = [0] * len(self.counts)
        self.sum = 0.0

    def buckets(self, bounds: tuple[float, ...] = ()) -> list[tuple[str, float]]:
        """The rows of a Prometheus exposition: upper bound as text, and the count at or below it.

        `bounds`: the subset of the bounds to return; empty for all.
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
    """A histogram with deferred counting: writers append values to `late`, whose identity never
    changes, and call `sort_in` when it is long; readers merge automatically."""

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

    @sum.setter  # noqa: A003  name of the base class
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
    """The quantile `share`, 0 to 1, of values counted by bucket of `bounds`; None if none."""
    found = quantiles(filled_buckets(counts), (share,), bounds)
    return found[0] if found else None


def filled_buckets(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Index and count of each bucket that is not empty, in order."""
    return [bucket for bucket in enumerate(counts) if bucket[1]]


def quantiles(
    buckets: Sequence[tuple[int, int]], shares: Sequence[float], bounds: tuple[float, ...] = FINE
) -> list[float]:
    """The quantiles `shares`, in ascending order, as `quantile`; an empty list if there are no
    values. `buckets`: as `filled_buckets` returns them."""
    total = sum(count for _, count in buckets)
    found: list[float] = []
    below = 0
    for index, count in buckets:
        while len(found) < len(shares) and below + count >= total * shares[len(found)]:
            low = bounds[index - 1] if index else 0.0
            high = bounds[min(index, len(bounds) - 1)]
            found.append(low + (high - low) * (total * shares[len(found)] - below) / count)
        below += count
    return found


TOTAL, FIRST = 0, 1  # the histograms: request duration, time to the first chunk
BOUNDS: Final = (DURATION, FIRST_CHUNK)  # the exported bounds of each
_LE: Final = tuple((*(f"{bound:.10g}" for bound in bounds), "+Inf") for bounds in BOUNDS)

Key = tuple[str, Worker | None]  # route, worker
Bucket = tuple[str, float]
MarkedBucket = Bucket | tuple[str, float, Exemplar]


class Noted(NamedTuple):
    """`secs`: the value in the histogram; `at`: Unix time."""

    trace_id: str
    secs: float
    at: float


class Exemplars:
    def __init__(self) -> None:
        self._noted: dict[Key, tuple[dict[int, Noted], dict[int, Noted]]] = {}

    def note(self, exchange: Exchange, worker: Worker | None, at: float) -> None:
        """Add an exchange that has ended and whose trace is sampled. `at`: Unix time."""
        if exchange.route is None or exchange.trace is None:
            return
        key, trace_id = (exchange.route.path, worker), exchange.trace.trace_id.decode()
        self.put(key, TOTAL, Noted(trace_id, exchange.ended_at - exchange.started_at, at))
        if exchange.first_at:
            self.put(key, FIRST, Noted(trace_id, exchange.first_at - exchange.started_at, at))

    def put(self, key: Key, kind: int, noted: Noted) -> None:
        """`kind`: TOTAL or FIRST. Dropped if the bucket has a newer exemplar."""
        buckets = self._noted.setdefault(key, ({}, {}))[kind]
        place = bisect_left(BOUNDS[kind], noted.secs)
        if place not in buckets or buckets[place].at <= noted.at:
            buckets[place] = noted

    def rows(self) -> Iterator[tuple[Key, int, Noted]]:
        for key, kinds in self._noted.items():
            for kind, buckets in enumerate(kinds):
                for noted in buckets.values():
                    yield key, kind, noted

    def keep(self, workers: Collection[Worker | None]) -> None:
        """Drop the exemplars of all other workers."""
        for key in [key for key in self._noted if key[1] not in workers]:
            del self._noted[key]

    def marks(self, keys: Iterable[Key], kind: int) -> dict[str, Exemplar]:
        """The newest exemplar of each bucket over all `keys`, by its upper bound as text."""
        newest: dict[int, Noted] = {}
        for key in keys:
            if key in self._noted:
                for place, noted in self._noted[key][kind].items():
                    if place not in newest or newest[place].at < noted.at:
                        newest[place] = noted
        return {
            _LE[kind][place]: Exemplar({"trace_id": noted.trace_id}, noted.secs, noted.at)
            for place, noted in newest.items()
        }


def marked(buckets: list[Bucket], marks: Mapping[str, Exemplar]) -> list[MarkedBucket]:
    """Buckets of an exposition, with the exemplars in `marks` added."""
    if not marks:
        return list(buckets)
    return [(le, count, marks[le]) if le in marks else (le, count) for le, count in buckets]
