"""Waits for an endpoint that has just been started, and for its workers.

Invariant: the wait is bounded, and its reason is reported. For an endpoint without /ready,
/server_info or /health is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from tools.training.endpoint import Endpoint

POLL_SECS: Final = 0.25
LEFT: Final = frozenset(("paused", "uncertain"))
AGAIN_SECS: Final = 10.0  # until an unchanged reason is reported again

Report = Callable[[str], None]


def wait_ready(endpoint: Endpoint, secs: float, report: Report) -> None:
    """Wait until all workers have been probed and at least one serves.

    Workers that are out of rotation by then are not waited for. Raises ValueError after `secs`.
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
            report(why)
        threading.Event().wait(POLL_SECS)


def _unready(endpoint: Endpoint) -> str:
    """Why the endpoint is not ready, "" if it is; not recorded in the calls of the syncs."""
    ready = endpoint.look("/ready")
    if ready.body.get("lasting"):
        return ""  # the first call of the sync reports it
    if ready.status == 404:
        facts = endpoint.look("/server_info")
        if facts.status == 404:  # vLLM has no /server_info
            facts = endpoint.look("/health")
        return "" if facts.status == 200 else facts.why
    unjudged = ready.body.get("unknown_workers")
    if isinstance(unjudged, int) and unjudged > 0:
        return f"{unjudged} of {ready.body.get('total_workers')} workers have not been probed yet"
    if ready.status == 200 or _left_by_a_trainer(ready.body.get("workers")):
        return ""
    return str(ready.body.get("reason") or ready.why)


def _left_by_a_trainer(workers: object) -> bool:
    """Whether all healthy workers are out of rotation only because of a trainer that died.

    It paused them, or left their weights unverified. The next sync fixes that, so don't wait.
    """
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
