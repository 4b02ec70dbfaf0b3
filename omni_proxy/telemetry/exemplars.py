"""Exemplars: for the buckets of some histograms, the trace of the newest request that fell there.

Only requests whose trace is sampled come here. Bounded: one for each bucket of a histogram, each
route and each worker of the fleet. Source: OpenMetrics 1.0, "Exemplars".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.samples import Exemplar

from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.histogram import DURATION, FIRST_CHUNK

if TYPE_CHECKING:
    from omni_proxy.dataplane.exchange.exchange import Exchange

TOTAL, FIRST = 0, 1  # the histograms: request duration, time to the first chunk
BOUNDS: Final = (DURATION, FIRST_CHUNK)  # of each, as exported
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
        """Of an exchange that is over and whose trace is sampled. `at`: Unix time."""
        if exchange.route is None or exchange.trace is None:
            return
        key, trace_id = (exchange.route.path, worker), exchange.trace.trace_id.decode()
        self.put(key, TOTAL, Noted(trace_id, exchange.ended_at - exchange.started_at, at))
        if exchange.first_at:
            self.put(key, FIRST, Noted(trace_id, exchange.first_at - exchange.started_at, at))

    def put(self, key: Key, kind: int, noted: Noted) -> None:
        """`kind`: TOTAL or FIRST. An older one than its bucket has is dropped."""
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
        """Those of others go."""
        for key in [key for key in self._noted if key[1] not in workers]:
            del self._noted[key]

    def marks(self, keys: Iterable[Key], kind: int) -> dict[str, Exemplar]:
        """By the upper bound of the bucket, as text; the newest of several series."""
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
    """Buckets of an exposition, with the exemplars of some."""
    if not marks:
        return list(buckets)
    return [(le, count, marks[le]) if le in marks else (le, count) for le, count in buckets]
