"""Liveness, readiness and health of the fleet.

Invariant: no route here waits for a worker. If a key is configured, a client without it gets the
counts of /ready and /health, but no worker's address.
"""

from __future__ import annotations

from quart import Quart, Response

from omni_proxy.admin_api.access.key_check import KeyCheck
from omni_proxy.admin_api.responses import json_response
from omni_proxy.admin_api.serializers.readiness import Readiness
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords
from omni_proxy.admin_api.services import DataPlaneView
from omni_proxy.fleet.registry import Fleet

PRIVATE = ("workers", "voice_routing")


class FleetHealthRoutes:
    def __init__(
        self,
        readiness: Readiness,
        records: WorkerRecords,
        keys: KeyCheck,
        fleet: Fleet,
        data_plane: DataPlaneView,
    ) -> None:
        self._readiness = readiness
        self._records = records
        self._keys = keys
        self._fleet = fleet
        self._data_plane = data_plane

    def mount(self, app: Quart) -> None:
        for view in (self.live, self.ready, self.health):
            app.add_url_rule(f"/{view.__name__}", view.__name__, view)
        # Paths of other routers for the same two checks.
        app.add_url_rule("/liveness", "liveness", self.live)
        app.add_url_rule("/readiness", "readiness", self.ready)

    async def live(self) -> Response:
        return json_response({"status": "alive"})

    async def ready(self) -> Response:
        reason = self._readiness.reason()
        summary = self._records.pool("not_ready" if reason else "ready")
        if reason:
            summary["reason"] = reason
            summary["message"] = self._readiness.describe(reason)
        return self._summary(summary, 503 if reason else 200)

    async def health(self) -> Response:
        well = self._readiness.is_healthy()
        summary = self._records.pool("healthy" if well else "unhealthy")
        summary["admission"] = self._data_plane.admission()
        summary["voice_routing"] = self._voice_routing()
        return self._summary(summary, 200 if well else 503)

    def _voice_routing(self) -> dict[str, object]:
        voices = self._data_plane.voices
        owner = self._fleet.find(voices.owner)
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
