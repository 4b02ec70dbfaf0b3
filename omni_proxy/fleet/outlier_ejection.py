"""Outlier ejection of one worker, and the circuit breaker through which it returns to rotation.

    closed ──a failed request too many──> open ──probes good again──> half-open ──success──> closed
                                            ^                             │
                                            └────────────failure──────────┘

Closed: the worker is ejected when `max_worker_retries` requests in a row have failed, or the run of
failures reaches `failure_threshold`. Open: no requests; there is no ejection time, good probes end
it. Half-open: one request at a time, until one succeeds. Invariant: while it is not closed, only
the half-open request counts, because all others began before. Pure.
States: `health_state.py`; `eject = "remove"`: `health/outlier_removal.py`. note:omni-router 9.
"""

from __future__ import annotations


class OutlierEjection:
    """The base class of `HealthMachine`. Every request reads these slots, and slots of a base class
    come first in memory."""

    __slots__ = ("breaker_tripped", "failed_requests", "half_open_count", "half_open_id")

    def __init__(self) -> None:
        self.breaker_tripped = False  # open or half-open: ejected, no request has succeeded since
        self.failed_requests = 0  # since the last successful one
        self.half_open_id = 0  # number of the half-open request in flight, 0 without one
        self.half_open_count = 0  # half-open requests begun so far

    def is_evidence(self, half_open_id: int) -> bool:
        """Whether the result of a request counts. `half_open_id`: the number of a half-open
        request, 0 for any other."""
        return not self.breaker_tripped or half_open_id == self.half_open_id != 0

    def count_failure(self, limit: int, *, over_threshold: bool) -> bool:
        """Count a failed request that is evidence. True if it ejects: it was the half-open one, or
        `limit` (0: none) have failed, or the run of failures is `over_threshold`."""
        self.failed_requests += 1
        ejects = self.breaker_tripped or over_threshold or 0 < limit <= self.failed_requests
        self.breaker_tripped = ejects
        return ejects

    def count_success(self) -> bool:
        """Count a successful request that is evidence. True if that closed the breaker."""
        closed, self.breaker_tripped = self.breaker_tripped, False
        self.half_open_id = self.failed_requests = 0
        return closed

    def reset_breaker(self) -> None:
        """Close the breaker and clear the counters: earlier results no longer apply."""
        self.breaker_tripped = False
        self.half_open_id = self.failed_requests = 0

    def begin_half_open(self) -> int:
        """Begin the half-open request; no other is routed until it ends. Returns its number."""
        self.half_open_count += 1
        self.half_open_id = self.half_open_count
        return self.half_open_id

    def end_half_open(self, half_open_id: int) -> bool:
        """The half-open request ended without a result that counts: the next request may be
        half-open. False if its result was recorded."""
        if half_open_id != self.half_open_id:
            return False
        self.half_open_id = 0
        return True
