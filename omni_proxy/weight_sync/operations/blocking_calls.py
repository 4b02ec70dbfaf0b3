"""BlockingCalls for calls that block, and others for what ends such calls.

Invariant: whoever ends a call never waits for the thread that it is in. Whoever is cancelled leaves
his call to that end; nothing here ends one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

T = TypeVar("T")


class BlockingCalls:
    """`most` calls at a time, and `ends` that end some; `name` is shown in each thread's."""

    def __init__(self, name: str, most: int, *, ends: int) -> None:
        self._name = name
        self._most = trio.CapacityLimiter(most)
        self._ends = trio.CapacityLimiter(ends)

    async def run(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        return await self._run(self._most, what, partial(call, *arguments))

    async def end(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        return await self._run(self._ends, what, partial(call, *arguments))

    async def _run(self, limiter: trio.CapacityLimiter, what: str, call: Callable[[], T]) -> T:
        name = f"weights-{self._name}-{what}"
        return await trio.to_thread.run_sync(
            call, thread_name=name, limiter=limiter, abandon_on_cancel=True
        )
