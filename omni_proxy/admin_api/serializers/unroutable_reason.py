"""Why a worker gets no requests, as every screen and record says it.

Contract: None exactly while the worker is routable; one sentence otherwise, for the cause that an
operator has to deal with first, with the command that ends it where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omni_proxy.admin_api.serializers.readiness import GO_ON
from omni_proxy.admin_api.services import Services
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.worker import LAUNCH_CORDON, Worker
from omni_proxy.weight_sync.protocol.journal import PauseRecord

RESOLVE = "`omni-proxy weights resolve` brings it back once its weights are verified"
Why = Callable[[Worker], str | None]


def reasons(rooms: Services, pauses: Mapping[str, PauseRecord]) -> Why:
    """The reasons of this moment; for several workers ask the same one.

    `pauses`: those of the book, as far as whoever asks may know them.
    """
    launch = rooms.launcher.status() if rooms.launcher else []
    places = {str(place["url"]): place for place in launch}

    def why(worker: Worker) -> str | None:
        if worker.routable:
            return None
        place = places.get(worker.url)
        return (
            _declared(worker)
            or _switched(worker, rooms.drains.secs_left)
            or (place is not None and LAUNCH_CORDON in worker.cordon_reasons and _launched(place))
            or _ill(worker)
            or _held(worker, rooms.desk.journal.uncertain, pauses)
            or "on trial: one request at a time until one goes well"
        )

    return why


def _declared(worker: Worker) -> str:
    return "dead: declared so by an operator" if worker.health.declared_dead else ""


def _switched(worker: Worker, secs_left: Callable[[Worker], float | None]) -> str:
    state = worker.health.state
    if not worker.disabled or state in (Health.DEAD, Health.UNHEALTHY):
        return ""
    if not worker.in_flight:
        return "disabled by an operator"
    left = secs_left(worker)
    until = f", {left:.0f} s left" if left else ""
    return f"draining: {worker.in_flight} in flight{until}"


def _launched(place: Mapping[str, object]) -> str:
    """The launcher knows more than a probe, which any program at that address may answer."""
    state = str(place["state"]).replace("_", " ")
    error = place["last_error"]
    return f"its process is {state}: {error}" if error else f"its process is {state}"


def _ill(worker: Worker) -> str:
    machine = worker.health
    if machine.state in (Health.DEAD, Health.UNHEALTHY):
        return f"{machine.state.value}: {machine.last_error or 'no reason known'}"
    if machine.state is not Health.UNKNOWN:
        return ""
    if machine.last_error:
        return f"not up yet: {machine.last_error}"
    return "waiting for good probes" if machine.last_checked_at else "waiting for its first probe"


def _held(worker: Worker, uncertain: Mapping[str, str], pauses: Mapping[str, PauseRecord]) -> str:
    if "uncertain" in worker.cordon_reasons and worker.url in uncertain:
        return f"uncertain: {uncertain[worker.url]}; {RESOLVE}"
    if "paused" in worker.cordon_reasons and worker.url in pauses:
        return f"{pauses[worker.url].describe()}; {GO_ON}"
    return f"held: {', '.join(sorted(worker.cordon_reasons))}" if worker.cordon_reasons else ""
