"""When a failed try may be made again, and after which pause.

Invariant: never after the first relayed byte; the caller asks only before it. A connection that was
kept idle and broke before any answer byte is redialled once without costing a try: its worker most
likely closed it before it saw the request (RFC 9112 9.3.1).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

FIRST_PAUSE_SECS: Final = 0.05
LONGEST_PAUSE_SECS: Final = 1.0


def tries_allowed(max_total_retries: int) -> int:
    """`max_total_retries` counts the tries of one request in all; 0 and 1 mean a single one."""
    return max(1, max_total_retries)


def may_retry(failure: str, made: int, allowed: int, retry_on: Collection[str]) -> bool:
    """`failure` is a name of `retry_on`; `made` tries of `allowed` are spent."""
    return made < allowed and failure in retry_on


def counts_as_failed(status: int, retry_on: Collection[str]) -> bool:
    """Whether a worker's answer with this status counts against it.

    A gateway's 502 and 504 always do. A 503 says "busy", which is no failure. Of other 5xx those
    do that are retried: whoever retries a 500 holds it for a failure of the worker.
    """
    if status < 500 or status == 503:
        return False
    return status in (502, 504) or str(status) in retry_on


def pause_secs(made: int, chance: float) -> float:
    """Before a worker is asked again, `made` such pauses after the first; `chance` is in [0, 1).

    Doubles from 50 ms to 1 s; half of it is left to chance, so that those who failed together
    don't come back together.
    """
    whole = min(LONGEST_PAUSE_SECS, FIRST_PAUSE_SECS * 2.0 ** min(made, 10))
    return max(FIRST_PAUSE_SECS, whole * (0.5 + 0.5 * chance))
