"""Where exchanges are counted: one `RouteSeries` per route and worker, one `RoutePhases` per route.

Invariant: a response that came whole in one chunk is counted in `SingleChunkCounts` alone, at the
cost of one index and three sums, until `gather` distributes it to the histograms that are read. So
every reader of a series gathers it first.
"""

from __future__ import annotations

from collections import Counter
from itertools import compress
from typing import Final

from omni_proxy.telemetry.histogram import (
    BETWEEN_CHUNKS,
    COARSE,
    DURATION,
    FINE,
    LONGEST_GAP,
    SHORT,
    Histogram,
    LateHistogram,
)
from omni_proxy.telemetry.recent_window import WindowCounts

EndKey = tuple[str | None, int, str]  # model, hundreds of the status, how it ended

NO_MODEL_SEEN: Final = object()  # equal to no model
_PLACES: Final = range(len(FINE) + 1)


class RoutePhases:
    """The times of one route, over all workers.

    `heads` and `own` are times of `head` and `overhead` that still have to be sorted in.
    """

    __slots__ = ("connect", "head", "heads", "longest_gap", "overhead", "own", "queue")

    def __init__(self) -> None:
        self.heads: list[float] = []
        self.own: list[float] = []
        self.queue = Histogram(DURATION)
        self.connect = Histogram(SHORT)
        self.head = Histogram(FINE)
        self.longest_gap = Histogram(LONGEST_GAP)
        self.overhead = Histogram(SHORT)

    def gather(self) -> None:
        self.head.observe_all(self.heads)
        self.overhead.observe_all(self.own)


class SingleChunkCounts:
    """What every request touches, close together: with many workers none of it is in a cache.

    `single_chunk_counts`: how many lie at each place of FINE, by their time. All of them ended as
    2xx, for one model: `model_key` as the client wrote it, `model` as it is told.
    """

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "model",
        "model_key",
        "phases",
        "single_chunk_counts",
        "single_chunk_secs",
    )

    def __init__(self, phases: RoutePhases) -> None:
        self.phases = phases
        self.model_key: object = NO_MODEL_SEEN
        self.model: str | None = None
        self.single_chunk_counts = [0] * len(_PLACES)
        self.single_chunk_secs = 0.0
        self.bytes_in = self.bytes_out = 0


class RouteSeries(SingleChunkCounts):
    """One route on one worker; no worker where nobody was tried."""

    __slots__ = ("between", "ends", "first", "pieces", "tokens", "total")

    def __init__(self, phases: RoutePhases) -> None:
        super().__init__(phases)
        self.ends: dict[EndKey, int] = {}
        self.total = Histogram(DURATION)
        self.first = Histogram(FINE)
        self.between = LateHistogram(BETWEEN_CHUNKS)
        self.pieces = 0
        self.tokens: Counter[tuple[str | None, str]] = Counter()  # model, type

    def gather(self, recent: WindowCounts) -> None:
        """Spread what came whole, over the worker's slot as well. As little as can be for each
        place: it is done for whole fleets at once."""
        counts = list(compress(self.single_chunk_counts, self.single_chunk_counts))
        places = list(compress(_PLACES, self.single_chunk_counts))
        total, first, head = self.total, self.first, self.phases.head
        for place, count in zip(places, counts, strict=True):
            total.counts[COARSE[place]] += count
            first.counts[place] += count
            head.counts[place] += count
            recent.firsts[place] += count
            self.single_chunk_counts[place] = 0
        for times in (total, first, head):
            times.sum += self.single_chunk_secs
        self.single_chunk_secs = 0.0
        count = sum(counts)
        end = (self.model, 2, "completed")
        self.ends[end] = self.ends.get(end, 0) + count
        self.pieces += count
        recent.requests += count
