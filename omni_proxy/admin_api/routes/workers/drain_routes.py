"""POST /workers/{worker_id}/drain, and DELETE with `drain`: a worker gets no new requests, and its
requests in flight are reported.

Invariant: a drain continues after its client has disconnected; no request in flight is cut.
"""

from __future__ import annotations

from datetime import UTC, datetime
from math import isfinite

from quart import Quart, Response, request

from omni_proxy.admin_api.access.key_check import caller
from omni_proxy.admin_api.fleet_changes import change_state, find_worker
from omni_proxy.admin_api.responses import etag, json_object, json_response
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords
from omni_proxy.admin_api.services import WorkerServices
from omni_proxy.config.fields import MAX_SECS
from omni_proxy.config.overlay import (
    DisabledBy,
    SavedState,
    with_disabled_by,
    with_override,
    with_pending_delete,
)
from omni_proxy.config.schema import Config
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.worker_drain import DRAINED, DRAINING, WorkerDrain
from omni_proxy.wire.errors import HttpError, bad_request


class DrainRoutes:
    def __init__(
        self, workers: WorkerServices, config_store: ConfigStore, records: WorkerRecords
    ) -> None:
        self._workers = workers
        self._config_store = config_store
        self._records = records

    def mount(self, app: Quart) -> None:
        rule = "/workers/<path:name>/drain"
        app.add_url_rule(rule, "drain_worker", self.drain, methods=["POST"])

    async def drain(self, name: str) -> Response:
        """Start a drain and answer immediately; GET /workers/{worker_id} has the progress."""
        body = await json_object()
        secs = self._secs(body.get("timeout_secs", request.args.get("timeout_secs")))
        worker = find_worker(self._workers.fleet, name)
        drain = await self._begin(worker, secs, remove=False)
        payload = {"status": DRAINING if drain.state == DRAINING else DRAINED}
        record = self._records.record(worker)
        headers = {
            "Location": f"/workers/{worker.id}",
            **etag(self._config_store.revision),
        }
        return json_response(
            {**payload, "worker": record}, 202 if drain.state == DRAINING else 200, headers
        )

    async def remove(self, worker: Worker) -> bool:
        """Drain and remove the worker; returns whether all of its requests ended in time. Raises
        HttpError."""
        drain = await self.begin_removal(worker)
        await drain.over.wait()
        if drain.refused:
            raise bad_request(drain.refused, "change_refused")
        if self._workers.fleet.find(worker.url) is worker:
            message = "the worker was enabled in the meantime; it was not removed"
            raise HttpError(409, message, "drain_cancelled", detail=message)
        return drain.in_time

    async def begin_removal(self, worker: Worker) -> WorkerDrain:
        """Remove the worker in the background once it is drained. Raises HttpError."""
        return await self._begin(worker, self._secs(request.args.get("timeout_secs")), remove=True)

    async def _begin(self, worker: Worker, secs: float, *, remove: bool) -> WorkerDrain:
        record = disabled_by_request()

        def edit(state: SavedState, _: Config) -> SavedState:
            find_worker(self._workers.fleet, worker.url)
            state = with_disabled_by(state, worker.url, record)
            if remove:
                return with_pending_delete(state, worker.url)
            return with_override(state, worker.url, disabled=True)

        await change_state(self._config_store, edit, at_once=True)
        return self._workers.drains.start(worker, secs, remove=remove)

    def _secs(self, value: object) -> float:
        """Raises HttpError 400."""
        if value is None:
            return self._config_store.config.server.drain_timeout_secs
        try:
            secs = float(value) if isinstance(value, str | int | float) else -1.0
        except (ValueError, OverflowError):
            secs = -1.0
        if isinstance(value, bool) or not isfinite(secs) or not 0 <= secs <= MAX_SECS:
            raise bad_request("timeout_secs must be a number of seconds, 0 for no deadline")
        return secs


def disabled_by_request() -> DisabledBy:
    """The record that the current request disables a worker."""
    return DisabledBy(by=caller(), at=datetime.now(UTC).isoformat(timespec="seconds"))
