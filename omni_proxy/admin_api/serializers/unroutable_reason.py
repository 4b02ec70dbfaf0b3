"""Why a worker gets no requests, as every screen and record shows it.

Contract: None exactly while the worker is routable; otherwise one sentence for the cause that an
operator has to act on first, with the command that ends it if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omni_proxy.admin_api.serializers.readiness import HOW_TO_CONTINUE
from omni_proxy.admin_api.services import Services
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.worker import LAUNCH_CORDON, Worker
from omni_proxy.weight_sync.protocol.journal import PauseRecord

RESOLVE = "`omni-proxy weights resolve` brings it back once its weights are verified"
Why = Callable[[Worker], str | None]


def reasons(services: Services, pauses: Mapping[str, PauseRecord]) -> Why:
    """A function of the current reasons, to call for each worker.

    `pauses`: from the state journal, reduced to what the caller may see.
    """
    launch = services.launcher.status() if services.launcher else []
    places = {str(place["url"]): place for place in launch}

    def why(worker: Worker) -> str | None:
        if worker.routable:
            return None
        place = places.get(worker.url)
        return (
            _declared_dead(worker)
            or _disabled(worker, services.drains.secs_left)
            or (place is not None and LAUNCH_CORDON in worker.cordon_reasons and _launching(place))
            or _unhealthy(worker)
            or _cordoned(worker, services.weight_operations.journal.uncertain, pauses)
            or "half-open: one request at a time until one succeeds"
        )

    return why


def _declared_dead(worker: Worker) -> str:
    return "dead: declared so by an operator" if worker.health.declared_dead else ""


def _disabled(worker: Worker, secs_left: Callable[[Worker], float | None]) -> str:
    state = worker.health.state
    if not worker.disabled or state in (Health.DEAD, Health.UNHEALTHY):
        return ""
    if not worker.in_flight:
        return "disabled by an operator"
    left = secs_left(worker)
    until = f", {left:.0f} s left" if left else ""
    return f"draining: {worker.in_flight} in flight{until}"


def _launching(place: Mapping[str, object]) -> str:
    """The launcher knows its own process; a probe may be answered by another one."""
    state = str(place["state"]).replace("_", " ")
    error = place["last_error"]
    return f"its process is {state}: {error}" if error else f"its process is {state}"


def _unhealthy(worker: Worker) -> str:
    health = worker.health
    if health.state in (Health.DEAD, Health.UNHEALTHY):
        return f"{health.state.value}: {health.last_error or 'no reason known'}"
    if health.state is not Health.UNKNOWN:
        return ""
    if health.last_error:
        return f"not up yet: {health.last_error}"
    return "waiting for good probes" if health.last_checked_at else "waiting for its first probe"


def _cordoned(
    worker: Worker, uncertain: Mapping[str, str], pauses: Mapping[str, PauseRecord]
) -> str:
    if "uncertain" in worker.cordon_reasons and worker.url in uncertain:
        return f"uncertain: {uncertain[worker.url]}; {RESOLVE}"
    if "paused" in worker.cordon_reasons and worker.url in pauses:
        return f"{pauses[worker.url].describe()}; {HOW_TO_CONTINUE}"
    return f"held: {', '.join(sorted(worker.cordon_reasons))}" if worker.cordon_reasons else ""
