"""GET /status: the program, its listeners, services and data plane, and the fleet in counts.

Invariant: it waits for no worker.
"""

from __future__ import annotations

import os
import time

from quart import Quart, Response

from omni_proxy import __version__, native
from omni_proxy.admin_api.responses import json_response
from omni_proxy.admin_api.serializers.discovery_report import discovery_rows
from omni_proxy.admin_api.serializers.key_records import key_refusals
from omni_proxy.admin_api.serializers.readiness import Readiness
from omni_proxy.admin_api.serializers.weight_status import pause_record
from omni_proxy.admin_api.services import Services


class StatusRoutes:
    def __init__(self, services: Services, readiness: Readiness) -> None:
        self._services = services
        self._readiness = readiness

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/status", "status", self.status)

    async def status(self) -> Response:
        services = self._services
        config_store, workers, process = services.config_store, services.workers, services.process
        reason = self._readiness.reason()
        data_plane = services.data_plane.status()
        return json_response(
            {
                "version": __version__,
                "pid": os.getpid(),
                "started_at": process.started_at.isoformat(),
                "uptime_secs": round(time.monotonic() - process.started, 3),
                "listeners": services.data_plane.addresses(),
                "build": native.build(),
                "revision": config_store.revision,
                "config_file": str(config_store.file) if config_store.file else None,
                "state_file": str(config_store.state_file) if config_store.state_file else None,
                "state_error": config_store.state_error or None,
                "last_reload": config_store.last_reload,
                "ready": not reason,
                "reason": reason or None,
                "paused": {
                    u: pause_record(pause)
                    for u, pause in services.weight_operations.journal.pauses().items()
                },
                "supervisors": process.supervisors(),
                "watchdog": services.data_plane.watchdog(),
                **key_refusals(services.keys),
                "data_plane": data_plane,
                "door": data_plane,  # the old name
                "fleet": workers.fleet.count_by_state(),
                "kv_modes": {
                    worker.url: {"kv_mode": worker.kv_mode, "kv_reason": worker.kv_reason}
                    for worker in workers.fleet.workers
                    if worker.kv_events != "off"
                },
                "upgrade": process.upgrade(),
                "launch": workers.launcher.status() if workers.launcher else [],
                "discovery": discovery_rows(workers.discovery),
                "cluster": services.cluster.status() if services.cluster else None,
                "picker": services.picker.status() if services.picker else None,
            }
        )
