"""Time for requests that run on workers which get no new ones any more.

Invariant: it waits for those alone that are held; what is late is left to the caller's own choice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from omni_proxy.fleet.worker import Worker

POLL_SECS: Final = 0.05
_log = logging.getLogger(__name__)


async def until_idle(workers: Sequence[Worker], within_secs: float, what: str) -> None:
    """0 s is no wait at all."""
    held = [worker for worker in workers if worker.holds]
    if not within_secs:
        return
    with trio.move_on_after(within_secs) as scope:
        while any(worker.in_flight for worker in held):  # noqa: ASYNC110  # plain ints ring no bell
            await trio.sleep(POLL_SECS)
    if scope.cancelled_caught:
        left = sum(worker.in_flight for worker in held)
        _log.info("%s does not wait for %d requests that still run", what, left)
