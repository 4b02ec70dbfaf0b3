"""Blocking calls in threads, with separate threads for the calls that end them.

Invariant: a call that ends another one never waits for that one's thread. A cancelled `run` leaves
its call running until it is ended so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import trio

NO_LIMIT_SECS: Final = 86400.0  # for a timeout that is off: torch requires a number

T = TypeVar("T")


class BlockingCalls:
    """At most `max_calls` at a time, and `max_ends` that end some; `name` is in thread names."""

    def __init__(self, name: str, max_calls: int, *, max_ends: int) -> None:
        self._name = name
        self._call_limiter = trio.CapacityLimiter(max_calls)
        self._end_limiter = trio.CapacityLimiter(max_ends)

    async def run(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        return await self._run(self._call_limiter, what, partial(call, *arguments))

    async def end(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        return await self._run(self._end_limiter, what, partial(call, *arguments))

    async def _run(self, limiter: trio.CapacityLimiter, what: str, call: Callable[[], T]) -> T:
        name = f"weights-{self._name}-{what}"
        return await trio.to_thread.run_sync(
            call, thread_name=name, limiter=limiter, abandon_on_cancel=True
        )
