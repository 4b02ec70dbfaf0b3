"""Waiting for an endpoint that was started a moment ago, and for what is behind it.

Invariant: bounded, and told why it waits. An endpoint that has no /ready is judged by its facts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from tools.training.endpoint import Endpoint

LOOK_SECS: Final = 0.25
LEFT: Final = frozenset(("paused", "uncertain"))
AGAIN_SECS: Final = 10.0  # the same reason is told again so often

Tell = Callable[[str], None]


def wait_ready(endpoint: Endpoint, secs: float, tell: Tell) -> None:
    """Until every worker has been judged and somebody serves. Raises ValueError after `secs`.

    Workers that are out by then do not hold it up, nor does one that could not be judged in time.
    """
    give_up_at = time.monotonic() + secs
    reported, reported_at = "", 0.0
    while why := _unready(endpoint):
        now = time.monotonic()
        if now >= give_up_at:
            if _serves(endpoint):
                return
            raise ValueError(f"{endpoint.url} is not ready after {secs:g} s: {why}")
        if why != reported or now >= reported_at + AGAIN_SECS:
            reported, reported_at = why, now
            tell(why)
        threading.Event().wait(LOOK_SECS)


def _unready(endpoint: Endpoint) -> str:
    """Why not, "" where it is; kept out of the endpoint's calls, which are those of the syncs."""
    ready = endpoint.look("/ready")
    if ready.body.get("lasting"):
        return ""  # the first call tells it
    if ready.status == 404:
        facts = endpoint.look("/server_info")
        if facts.status == 404:  # as at vLLM
            facts = endpoint.look("/health")
        return "" if facts.status == 200 else facts.why
    unjudged = ready.body.get("unknown_workers")
    if isinstance(unjudged, int) and unjudged > 0:
        return f"{unjudged} of {ready.body.get('total_workers')} workers have not come up yet"
    if ready.status == 200 or _left_by_a_trainer(ready.body.get("workers")):
        return ""
    return str(ready.body.get("reason") or ready.why)


def _left_by_a_trainer(workers: object) -> bool:
    """Whether those that are well are out for nothing but a trainer that died: it paused them, or
    their weights are in doubt. The next one mends that, so it must not wait for it."""
    if not isinstance(workers, list):
        return False
    well = [
        each["held_by"]
        for each in workers
        if each.get("health_state") == "healthy" and not each.get("disabled")
    ]
    return bool(well) and all(held and LEFT.issuperset(held) for held in well)


def _serves(endpoint: Endpoint) -> bool:
    return endpoint.look("/ready").status == 200
