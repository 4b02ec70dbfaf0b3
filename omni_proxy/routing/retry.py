"""When a failed try may be made again.

Invariant: never after the first relayed byte; the caller asks only before it. A connection that was
kept idle and broke before any answer byte is redialled once without costing a try: its worker most
likely closed it before it saw the request (RFC 9112 9.3.1).
"""

from __future__ import annotations

from collections.abc import Collection


def tries_allowed(max_total_retries: int) -> int:
    """`max_total_retries` counts the tries of one request in all; 0 and 1 mean a single one."""
    return max(1, max_total_retries)


def may_retry(failure: str, made: int, allowed: int, retry_on: Collection[str]) -> bool:
    """`failure` is a name of `retry_on`; `made` tries of `allowed` are spent."""
    return made < allowed and failure in retry_on
