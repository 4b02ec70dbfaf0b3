"""Whom the door tells of its exchanges: log sinks and meters, as it needs them to be.

Contract: nothing here waits or fails; the one who is told keeps nothing of an exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from omni_proxy.fleet.worker import Worker

if TYPE_CHECKING:
    from omni_proxy.dataplane.exchange.exchange import Exchange


class LineSink(Protocol):
    """Where log lines go: takes each at once, loses it rather than wait."""

    def write(self, record: bytes) -> None: ...


class Gaps(Protocol):
    """How long it was between two pieces, in seconds: put into `late`, later sorted in."""

    late: list[float]

    def sort_in(self) -> None:
        """Empties `late`, which stays the same list."""


class RequestObserver(Protocol):
    """Who counts the exchanges that have ended, and what of the others can't wait for that."""

    def record(self, mine: Exchange, worker: Worker | None) -> None: ...

    def record_single_chunk(self, mine: Exchange, worker: Worker | None) -> None:
        """As `record`, of what went the short way."""

    def gap_histogram(self, mine: Exchange) -> Gaps | None: ...
