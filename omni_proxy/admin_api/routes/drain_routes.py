"""Draining a worker over HTTP: it gets no new request, and its requests in flight can be watched.

Invariant: a drain goes on after its client has disconnected; no request in flight is cut.
"""

from __future__ import annotations

from math import isfinite

from quart import Quart, Response, request

from omni_proxy.admin_api.fleet_changes import FleetChanges
from omni_proxy.admin_api.responses import bad_request, etag, json_object, json_response
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords
from omni_proxy.admin_api.services import Services
from omni_proxy.config.overlay import SavedState, with_override, with_pending_delete
from omni_proxy.config.schema import Config
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.worker_drain import DRAINED, DRAINING, WorkerDrain
from omni_proxy.wire.errors import HttpError

LONGEST_SECS = 1_000_000_000
SWITCH = {"true": True, "1": True, "yes": True, "": False, "false": False, "0": False, "no": False}


class DrainRoutes:
    def __init__(self, services: Services, records: WorkerRecords) -> None:
        self._services = services
        self._records = records
        self._changes = FleetChanges(services)

    def mount(self, app: Quart) -> None:
        rule = "/workers/<path:name>/drain"
        app.add_url_rule(rule, "drain_worker", self.drain, methods=["POST"])

    async def drain(self, name: str) -> Response:
        """Answers at once; GET /workers/{worker_id} tells how it goes."""
        body = await json_object()
        secs = self._secs(body.get("timeout_secs", request.args.get("timeout_secs")))
        worker = self._changes.find(name)
        drain = await self._begin(worker, secs, remove=False)
        payload = {"status": DRAINING if drain.state == DRAINING else DRAINED}
        record = self._records.record(worker)
        headers = {
            "Location": f"/workers/{worker.id}",
            **etag(self._services.config_store.revision),
        }
        return json_response(
            {**payload, "worker": record}, 202 if drain.state == DRAINING else 200, headers
        )

    async def remove(self, worker: Worker) -> bool:
        """Returns once it is gone: whether all of its requests had ended. Raises HttpError."""
        drain = await self.begin_removal(worker)
        await drain.over.wait()
        if drain.refused:
            raise bad_request(drain.refused, "change_refused")
        if self._services.fleet.find(worker.url) is worker:
            message = "somebody enabled the worker again; it was not removed"
            raise HttpError(409, message, "drain_cancelled", detail=message)
        return drain.in_time

    async def begin_removal(self, worker: Worker) -> WorkerDrain:
        """It goes by itself once it is drained. Raises HttpError."""
        return await self._begin(worker, self._secs(request.args.get("timeout_secs")), remove=True)

    async def _begin(self, worker: Worker, secs: float, *, remove: bool) -> WorkerDrain:
        def edit(state: SavedState, _: Config) -> SavedState:
            self._changes.find(worker.url)
            if remove:
                return with_pending_delete(state, worker.url)
            return with_override(state, worker.url, disabled=True)

        await self._changes.change(edit, at_once=True)
        return self._services.drains.start(worker, secs, remove=remove)

    def _secs(self, given: object) -> float:
        """Raises HttpError 400."""
        if given is None:
            return self._services.config_store.config.server.drain_timeout_secs
        try:
            secs = float(given) if isinstance(given, str | int | float) else -1.0
        except (ValueError, OverflowError):
            secs = -1.0
        if isinstance(given, bool) or not isfinite(secs) or not 0 <= secs <= LONGEST_SECS:
            raise bad_request("timeout_secs must be a number of seconds, 0 for no deadline")
        return secs


def asked_to_drain() -> bool:
    """Raises HttpError 400 for a `drain` that is neither yes nor no."""
    given = request.args.get("drain", "").lower()
    if given not in SWITCH:
        raise bad_request("drain must be true or false")
    return SWITCH[given]
