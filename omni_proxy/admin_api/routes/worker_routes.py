"""Workers over HTTP: list, get, add, change, drain, delete (note:omni-router 5, and
sgl-model-gateway's dialect).

Invariants: every change goes through the configuration store, whole or not at all; health
(`is_dead`) is not configuration and goes to the fleet, after the change was accepted. A drain
continues after its client has disconnected; no request in flight is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import wraps
from math import isfinite
from typing import ParamSpec

from quart import Quart, Response, request

from omni_proxy.admin_api.access.key_check import caller
from omni_proxy.admin_api.fleet_changes import (
    MAX_WAIT_SECS,
    WAIT_SECS,
    FleetChanges,
    WorkerArrivals,
    api_worker_spec,
    change_state,
    find_worker,
    lookup_worker,
    requested_url,
    with_gateway_code,
)
from omni_proxy.admin_api.responses import etag, json_object, json_response, query_flag
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords
from omni_proxy.admin_api.services import WorkerServices
from omni_proxy.admin_api.worker_requests import WorkerBody, parse_add, parse_patch, parse_put
from omni_proxy.config.fields import MAX_SECS
from omni_proxy.config.overlay import (
    DisabledBy,
    SavedState,
    WorkerSpec,
    with_disabled_by,
    with_override,
    with_pending_delete,
)
from omni_proxy.config.schema import Config
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore, Edit
from omni_proxy.runtime_config.worker_drain import DRAINED, DRAINING, WorkerDrain
from omni_proxy.wire.errors import HttpError, bad_request

log = logging.getLogger(__name__)
Given = ParamSpec("Given")
View = Callable[Given, Awaitable[Response]]


class WorkerRoutes:
    def __init__(
        self,
        workers: WorkerServices,
        config_store: ConfigStore,
        records: WorkerRecords,
        changes: FleetChanges,
        drains: DrainRoutes,
    ) -> None:
        self._workers = workers
        self._fleet = workers.fleet
        self._config_store = config_store
        self._records = records
        self._changes = changes
        self._notes = records.notes
        self._drains = drains
        self._arrivals = WorkerArrivals(workers, config_store)

    def mount(self, app: Quart) -> None:
        # A path converter, because Werkzeug has already decoded the %2F of a worker id.
        rule = "/workers/<path:name>"
        app.add_url_rule("/workers", "workers", self.all)
        app.add_url_rule("/workers", "add_worker", _coded(self.add), methods=["POST"])
        app.add_url_rule(rule, "worker", _coded(self.one))
        app.add_url_rule(rule, "switch_worker", _coded(self.switch), methods=["PUT"])
        app.add_url_rule(rule, "patch_worker", _coded(self.patch), methods=["PATCH"])
        app.add_url_rule(rule, "delete_worker", _coded(self.delete), methods=["DELETE"])

    async def all(self) -> Response:
        pool = self._records.pool("ok", request.args.get("model"))
        roles = [worker.role for worker in self._fleet.workers]
        total = len(roles)
        stats = {f"{role}_count": roles.count(role) for role in ("prefill", "decode", "regular")}
        return json_response({**pool, "total": total, "stats": stats})

    async def one(self, name: str) -> Response:
        worker = find_worker(self._fleet, name)
        limit = self._config_store.config.health.startup_timeout_secs
        job = self._notes.job_status(worker, datetime.now(UTC), limit)
        return json_response({**self._records.record(worker), **job})

    async def add(self) -> Response:
        body = await json_object()
        parsed = parse_add(body, prefers_async=self._is_async())
        url, ranks = requested_url(body)
        await self._changes.check_address(url)
        entry = api_worker_spec(
            url, ranks | parsed.settings, self._config_store.startup.kv_connector
        )
        wait_secs = self._wait_secs()
        if wait_secs is not None:
            return await self._add_when_healthy(entry, parsed, wait_secs)
        worker = await self._changes.add(entry)
        log.info("worker_registered worker=%s url=%s", worker.display_id, url)
        self._notes.update(worker, parsed.note_fields)
        if parsed.in_background:
            self._notes.update(worker, {"requested_at": datetime.now(UTC)})
            return self._accepted(
                worker, "worker added; its first probe is running", parsed.ignored
            )
        if worker.health.last_checked_at is None:
            await self._workers.prober.probe_once(worker)
        return self._done(worker)

    async def _add_when_healthy(
        self, entry: WorkerSpec, parsed: WorkerBody, wait_secs: float
    ) -> Response:
        """Add a worker once it is healthy, for clients that take a 200 as "registered and
        routable". Raises HttpError 400 if it is not healthy in time, and 409; then nothing has
        changed."""
        self._changes.refuse_known(entry.url)
        await self._arrivals.until_healthy(entry, wait_secs)
        worker = await self._changes.add(entry)
        log.info("worker_registered worker=%s url=%s", worker.display_id, worker.url)
        self._notes.update(worker, parsed.note_fields)
        await self._arrivals.until_routable(worker)
        extra = {"ignored": parsed.ignored} if parsed.ignored else {}
        message = f"Worker {worker.url} added successfully"
        return self._done(worker, success=True, message=message, **extra)

    def _wait_secs(self) -> float | None:
        """How long the response waits for the worker to be healthy; None: it does not wait. Without
        `Prefer` only vllm-router's dialect waits. Raises HttpError 400."""
        preferences = _preferences()
        waits = "wait" in preferences or self._config_store.startup.dialect == "vllm"
        if not waits or "respond-async" in preferences:
            return None
        limit = self._config_store.config.health.startup_timeout_secs or WAIT_SECS
        extra = preferences.get("wait", "")
        if not extra:
            return limit
        if not extra.isdigit() or int(extra) > MAX_WAIT_SECS:
            raise bad_request(f"Prefer: wait={extra}: write seconds, up to {MAX_WAIT_SECS:g}")
        return float(extra)

    async def switch(self, name: str) -> Response:
        body = await json_object()
        registered = lookup_worker(self._fleet, name)
        parsed = parse_put(
            body, registered.url if registered else None, prefers_async=self._is_async()
        )
        worker = find_worker(self._fleet, name)
        # Disabling and enabling must not wait for an update that hangs.
        at_once = parsed.settings.keys() <= {"disabled"}
        await change_state(
            self._config_store, self._switching(worker, parsed.settings), at_once=at_once
        )
        log.info("worker_updated worker=%s url=%s", worker.display_id, worker.url)
        self._notes.update(worker, parsed.note_fields)
        if parsed.is_dead:
            self._fleet.mark_dead(worker, datetime.now(UTC), declared=True)
        elif parsed.is_dead is False:
            self._fleet.revive(worker, datetime.now(UTC))
            if not parsed.in_background:
                await self._workers.prober.probe_once(worker)
        if parsed.in_background:
            return self._accepted(worker, "worker updated", parsed.ignored)
        return self._done(worker)

    async def patch(self, name: str) -> Response:
        parsed = parse_patch(await json_object())
        worker = find_worker(self._fleet, name)
        await change_state(
            self._config_store, self._switching(worker, parsed.settings), at_once=True
        )
        self._notes.update(worker, parsed.note_fields)
        return self._accepted(worker, "worker updated", parsed.ignored)

    async def delete(self, name: str) -> Response:
        worker = find_worker(self._fleet, name)
        payload: dict[str, object] = {"status": "ok", "worker_id": self._notes.public_id(worker)}
        if query_flag("drain"):
            if self._is_async():
                await self._drains.begin_removal(worker)
                return self._accepted(worker, "worker drains; it is removed with its last request")
            payload["drained"] = await self._drains.remove(worker)
        else:
            await self._changes.remove(worker)
        log.info("worker_deleted worker=%s url=%s", worker.display_id, worker.url)
        if worker.origin == "launch":
            payload["process"] = "stops"
        if self._is_async():
            return self._accepted(worker, "worker removed")
        return json_response(payload, headers=etag(self._config_store.revision))

    def _is_async(self) -> bool:
        """Whether to answer before the change is done; by default in the dialects of sglang-router
        and smg."""
        preferences = _preferences()
        if "respond-async" in preferences:
            return True
        return self._config_store.startup.dialect == "sglang" and "wait" not in preferences

    def _switching(self, worker: Worker, switches: Mapping[str, object]) -> Edit:
        record = disabled_by_request()

        def edit(state: SavedState, _: Config) -> SavedState:
            find_worker(self._fleet, worker.url)
            if switches.get("disabled"):
                state = with_disabled_by(state, worker.url, record)
            return with_override(state, worker.url, **switches) if switches else state

        return edit

    def _done(self, worker: Worker, **extra: object) -> Response:
        headers = etag(self._config_store.revision)
        record = self._records.record(worker)
        return json_response(
            {"status": "ok", **extra, **self._naming(worker), "worker": record}, headers=headers
        )

    def _accepted(self, worker: Worker, message: str, ignored: Sequence[str] = ()) -> Response:
        response: dict[str, object] = {
            "status": "accepted",
            **self._naming(worker),
            "message": message,
            "worker": self._records.record(worker),
        }
        if ignored:
            response["ignored"] = ignored
        location = str(response["location"])
        headers = {"Location": location, **etag(self._config_store.revision)}
        return json_response(response, 202, headers)

    def _naming(self, worker: Worker) -> dict[str, object]:
        """The top-level keys that smg's clients read in every response about a worker."""
        name = self._notes.public_id(worker)
        return {"worker_id": name, "url": worker.url, "location": f"/workers/{name}"}


def _coded(view: View[Given]) -> View[Given]:
    """Add smg's error code to errors of the view: its clients call these routes, too."""

    @wraps(view)
    async def parsed(*args: Given.args, **parameters: Given.kwargs) -> Response:
        try:
            return await view(*args, **parameters)
        except HttpError as error:
            with_gateway_code(error)
            raise

    return parsed


def _preferences() -> dict[str, str]:
    """The preferences that the request names (RFC 7240), with their values."""
    preferences = request.headers.get("Prefer", "").lower().replace(";", ",").split(",")
    parts = (part.partition("=") for part in preferences)
    return {name.strip(): value.strip(' "') for name, _, value in parts}


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
