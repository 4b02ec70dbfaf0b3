"""Spreads the starts of many tasks over iterations of the event loop.

Invariant: waiting tasks start in the order in which they came. If all of them ran in the same
iteration, each checkpoint of a status request would take as long as all of them.
"""

from __future__ import annotations

import trio


class StartThrottle:
    """Lets one task start in each loop iteration, or in each `iterations` of them."""

    def __init__(self, iterations: int = 1) -> None:
        self._lock = trio.Lock()
        self._iterations = iterations

    async def wait_turn(self) -> None:
        async with self._lock:  # its release wakes the next task in the next iteration
            for _ in range(self._iterations - 1):
                await trio.lowlevel.checkpoint()
