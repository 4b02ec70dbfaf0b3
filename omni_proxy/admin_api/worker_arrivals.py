"""Waiting for a worker that joins: until it answers its health check, and until it is routable.

Contract: nothing here changes the fleet. A wait ends with its time, and each step of it is a
checkpoint.
"""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import quote

import trio

from omni_proxy.admin_api.responses import bad_request
from omni_proxy.admin_api.services import Services
from omni_proxy.config.overlay import WorkerSpec, with_defaults
from omni_proxy.config.url import dial_address
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import Call, call_worker
from omni_proxy.upstream_http.resolver import RefusedAddress, resolve
from omni_proxy.wire.errors import HttpError

WAIT_SECS = 30.0  # for a worker that is still starting, by default
MAX_WAIT_SECS = 7200.0
PAUSE_SECS = 0.25
PROBE_PAUSE_SECS = 0.05
NO_PROBE_ENDS = ("paused", "uncertain")  # cordons
ROUTABLE_SECS = 5.0  # from registered to routable; past it the worker is in, only not believed yet


class WorkerArrivals:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def until_routable(self, worker: Worker) -> None:
        """Returns early for a worker that is not probed (dead, or removed in the meantime), and for
        one that only an operator or a trainer can bring back: paused, or with unknown weights."""
        with trio.move_on_after(ROUTABLE_SECS):
            while (
                not worker.routable
                and self._is_probed(worker)
                and worker.cordon_reasons.isdisjoint(NO_PROBE_ENDS)
            ):
                await self._services.prober.probe_once(worker)
                await trio.sleep(PROBE_PAUSE_SECS)

    def _is_probed(self, worker: Worker) -> bool:
        here = self._services.fleet.find(worker.url) is worker
        return here and worker.health.state is not Health.DEAD

    async def until_healthy(self, entry: WorkerSpec, wait_secs: float) -> None:
        """Raises HttpError 400 with the last reason when it stays ill for so long."""
        why = "it has not answered"
        with trio.move_on_after(wait_secs):
            while True:
                why = await self._illness(entry)
                if not why:
                    return
                await trio.sleep(PAUSE_SECS)
        raise HttpError(
            400,
            f"Failed to add worker: {entry.url} did not become healthy within {wait_secs:g} s: "
            f"{why}",
            "worker_not_healthy",
        )

    async def _illness(self, entry: WorkerSpec) -> str:
        """Why the worker is not healthy now, "" when it is."""
        health = self._services.config_store.config.health
        worker = Worker(with_defaults(entry, self._services.config_store.config), datetime.now(UTC))
        place = dial_address(entry.url)
        try:
            if not isinstance(place, str):
                worker.address = await resolve(*place)
        except RefusedAddress as refused:
            raise bad_request(f"url: {refused}", "worker_url_refused") from None
        except OSError as error:
            return str(error)
        target = quote(health.endpoint, safe="/%:@!$&'()*+,;=~?")
        outcome = await call_worker(worker, Call("GET", target, timeout_secs=health.timeout_secs))
        if outcome.ok:
            return ""
        return f"{outcome.failure}: {outcome.detail}" if outcome.detail else outcome.failure
