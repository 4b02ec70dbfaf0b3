"""Fan-out: the same call for several items, concurrently.

Contract: there is one result for each item; a call that may fail returns its failure as a result.
Must not know what is called.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

Item = TypeVar("Item")
Result = TypeVar("Result")


async def call_each(
    items: Sequence[Item],
    call: Callable[[Item], Awaitable[Result]],
    *,
    max_parallel: float = math.inf,
) -> list[Result]:
    """Call for all items concurrently, at most `max_parallel` at a time. The results are in the
    order of the items; an exception of a call cancels the others."""
    results: dict[int, Result] = {}
    limiter = trio.CapacityLimiter(max_parallel)

    async def call_one(number: int) -> None:
        async with limiter:
            results[number] = await call(items[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(items)):
            nursery.start_soon(call_one, number)
    return [results[number] for number in range(len(items))]
