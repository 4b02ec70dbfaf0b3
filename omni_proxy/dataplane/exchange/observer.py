"""Observer interfaces for exchanges: log sinks and metrics, and the record of those in use.

Contract: nothing here waits or fails; an observer keeps no reference to an exchange.
"""

from __future__ import annotations

from typing import Protocol

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.fleet.worker import Worker


class LineSink(Protocol):
    """Takes log lines; each at once, and drops it rather than wait."""

    def write(self, record: bytes) -> None: ...


class GapRecorder(Protocol):
    """Seconds between two chunks of a response: appended to `late`, sorted into buckets later."""

    late: list[float]

    def sort_in(self) -> None:
        """Empties `late`, which stays the same list."""


class RequestObserver(Protocol):
    """Counts exchanges that have ended, and what of the others can't wait for that."""

    def record(self, exchange: Exchange, worker: Worker | None) -> None: ...

    def gap_histogram(self, exchange: Exchange) -> GapRecorder | None: ...


class Recorders:
    """The observers in use; None where one is switched off."""

    def __init__(self) -> None:
        self.access_log: LineSink | None = None
        self.route_log: LineSink | None = None
        self.meters: RequestObserver | None = None


class UnobservedGaps:
    """Gaps that nothing counts: taken all the same, so that the relay need not ask."""

    def __init__(self) -> None:
        self.late: list[float] = []

    def sort_in(self) -> None:
        self.late.clear()
