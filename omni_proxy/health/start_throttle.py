"""Many tasks of ours that want to begin in one moment: one of them in so many turns of the loop.

Invariant: whoever waits here waits in line. Were they all to run in each turn of the event loop, a
request for the status would wait for all of them at every step that it takes itself.
"""

from __future__ import annotations

import trio


class StartThrottle:
    """One task begins in each turn, or in each so many: what can wait leaves them to the others."""

    def __init__(self, turns: int = 1) -> None:
        self._line = trio.Lock()
        self._turns = turns

    async def wait_turn(self) -> None:
        async with self._line:  # its release wakes the next one, in the turn after this
            for _ in range(self._turns - 1):
                await trio.lowlevel.checkpoint()
