"""Liveness, readiness and health of the fleet.

Invariant: no route here waits for a worker. If a key is configured, a client without it gets the
counts of /ready and /health, but no worker's address.
"""

from __future__ import annotations

from quart import Quart, Response

from omni_proxy.admin_api.access.key_check import KeyCheck
from omni_proxy.admin_api.responses import json_response
from omni_proxy.admin_api.serializers.readiness import describe_reason, is_opening, unready
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords
from omni_proxy.admin_api.services import Services
from omni_proxy.fleet.cordon_reasons import WEIGHT_CORDONS
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.partners import can_serve

PRIVATE = ("workers", "voice_routing")


def _well(worker: Worker) -> bool:
    healthy = worker.health.state is Health.HEALTHY
    return healthy and not worker.disabled and worker.cordon_reasons <= WEIGHT_CORDONS


class FleetHealthRoutes:
    def __init__(self, services: Services, keys: KeyCheck, records: WorkerRecords) -> None:
        self._services = services
        self._keys = keys
        self._records = records

    def mount(self, app: Quart) -> None:
        for view in (self.live, self.ready, self.health):
            app.add_url_rule(f"/{view.__name__}", view.__name__, view)
        # Paths of other routers for the same two checks.
        app.add_url_rule("/liveness", "liveness", self.live)
        app.add_url_rule("/readiness", "readiness", self.ready)

    async def live(self) -> Response:
        return json_response({"status": "alive"})

    async def ready(self) -> Response:
        reason = unready(self._services)
        summary = self._records.pool("not_ready" if reason else "ready")
        if reason:
            summary["reason"] = reason
            summary["message"] = describe_reason(self._services, reason)
        return self._summary(summary, 503 if reason else 200)

    async def health(self) -> Response:
        fleet = self._services.fleet
        rules = self._services.config_store.config.routing.disaggregation
        well = can_serve(
            (worker for worker in fleet.workers if _well(worker)),
            fallback=rules.fallback == "decode",
            same_version=False,  # during an update the versions differ
        ) and not is_opening(self._services)
        # Healthy even without workers: scripts wait for this before engines register.
        well |= self._services.dialect != "omni" and not fleet.had_workers
        summary = self._records.pool("healthy" if well else "unhealthy")
        summary["admission"] = self._services.data_plane.admission()
        summary["voice_routing"] = self._voice_routing()
        return self._summary(summary, 200 if well else 503)

    def _voice_routing(self) -> dict[str, object]:
        voices = self._services.data_plane.voices
        owner = self._services.fleet.find(voices.owner)
        return {
            "owner_worker_id": owner.id if owner else None,
            "owner_url": voices.owner or None,
            "owner_routable": owner.routable if owner else False,
            "registry_state": voices.state,
            "uploaded_voice_count": len(voices.names or ()),
            "last_refresh_error": voices.refresh_error or None,
        }

    def _summary(self, summary: dict[str, object], status: int) -> Response:
        if not self._keys.presented():
            summary = {name: value for name, value in summary.items() if name not in PRIVATE}
        return json_response(summary, status)
