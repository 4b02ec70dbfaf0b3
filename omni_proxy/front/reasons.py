"""Why a worker gets no requests, as every screen and record says it.

PURE. Contract: None exactly while the worker is routable; one sentence otherwise, the first cause.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_proxy.fleet.health import Health
from omni_proxy.fleet.worker import Worker


def why_out(worker: Worker, secs_left: Callable[[Worker], float | None]) -> str | None:
    """Why it gets no request, in a sentence; None while it gets some."""
    machine = worker.machine
    if worker.routable:
        return None
    if machine.declared_dead:
        return "dead: declared so by an operator"
    if machine.state in (Health.DEAD, Health.UNHEALTHY):
        return f"{machine.state.value}: {machine.last_error or 'no reason known'}"
    if worker.disabled:
        if not worker.in_flight:
            return "disabled by an operator"
        left = secs_left(worker)
        until = f", {left:.0f} s left" if left else ""
        return f"draining: {worker.in_flight} in flight{until}"
    if machine.state is Health.UNKNOWN:
        if machine.last_error:
            return f"not up yet: {machine.last_error}"
        return (
            "waiting for good probes" if machine.last_checked_at else "waiting for its first probe"
        )
    if worker.holds:
        return f"held: {', '.join(sorted(worker.holds))}"
    return "on trial: one request at a time until one goes well"
