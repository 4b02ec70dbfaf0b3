"""The interfaces of what observes exchanges: log sinks, metrics and the recorder of gaps.

Contract: an observer neither waits nor fails, and keeps no reference to an exchange. `Recorders`
has the current ones; a reload replaces them. Must not count or log anything itself.
"""

from __future__ import annotations

from typing import Protocol

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.fleet.worker import Worker


class LineSink(Protocol):
    """Accepts log lines without waiting; drops a line that it can't store."""

    def write(self, record: bytes) -> None: ...


class GapRecorder(Protocol):
    """Counts seconds between two chunks of a response. Callers append them to `late`, and call
    `sort_in` when there are many."""

    late: list[float]

    def sort_in(self) -> None:
        """Count and clear `late`, which stays the same list."""


class RequestObserver(Protocol):
    """Counts exchanges that have ended, and some events of running ones."""

    def record(self, exchange: Exchange, worker: Worker | None) -> None: ...

    def note_trace(self, exchange: Exchange, worker: Worker | None) -> None:
        """The exchange has ended, and its trace is sampled."""

    def record_prefill(self, exchange: Exchange, worker: Worker) -> None:
        """A prefill leg succeeded."""

    def gap_histogram(self, exchange: Exchange) -> GapRecorder | None: ...

    def count_target(self, alias: str, target: str) -> None: ...

    def count_cached(self, worker: Worker, predicted: int, reported: int) -> None:
        """Count prompt tokens that were predicted to be cached, and that the worker reported."""


class Recorders:
    """The current observers; None for one that is disabled."""

    def __init__(self) -> None:
        self.access_log: LineSink | None = None
        self.spans: LineSink | None = None
        self.route_log: LineSink | None = None
        self.meters: RequestObserver | None = None


class UnobservedGaps:
    """A `GapRecorder` that discards the gaps, so that the relay needs no check."""

    def __init__(self) -> None:
        self.late: list[float] = []

    def sort_in(self) -> None:
        self.late.clear()
