"""Liveness, readiness and health of the fleet; status, configuration, reload, and callers.

Invariant: no route here waits for a worker. If a key is configured, a client without it gets the
counts of /ready and /health, but no worker's address.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial

from quart import Quart, Response

from omni_proxy import __version__, native
from omni_proxy.admin_api.access.key_check import KeyCheck
from omni_proxy.admin_api.fleet_changes import FleetChanges
from omni_proxy.admin_api.responses import (
    bad_request,
    etag,
    if_match,
    json_object,
    json_response,
    raise_on_mismatch,
)
from omni_proxy.admin_api.serializers.discovery_report import discovery_rows
from omni_proxy.admin_api.serializers.key_records import key_records, key_refusals
from omni_proxy.admin_api.serializers.readiness import describe_reason, is_opening, unready
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords
from omni_proxy.admin_api.services import Services
from omni_proxy.config.diff import redacted
from omni_proxy.config.schema import Config
from omni_proxy.config.state import (
    KeyKnown,
    KeyRefused,
    SavedState,
    read_saved_key,
    with_key,
    without_key,
)
from omni_proxy.fleet.cordon_reasons import WEIGHT_CORDONS
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.partners import can_serve
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)

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
        for view in (self.live, self.ready, self.health, self.status):
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

    async def status(self) -> Response:
        services = self._services
        config_store = services.config_store
        reason = unready(services)
        data_plane = services.data_plane.status()
        return json_response(
            {
                "version": __version__,
                "pid": os.getpid(),
                "started_at": services.started_at.isoformat(),
                "uptime_secs": round(time.monotonic() - services.started, 3),
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
                    u: pause.to_dict()
                    for u, pause in services.weight_operations.journal.pauses().items()
                },
                "supervisors": services.supervisors(),
                "watchdog": services.data_plane.watchdog(),
                **key_refusals(services),
                "data_plane": data_plane,
                "door": data_plane,  # the old name
                "fleet": services.fleet.count_by_state(),
                "kv_modes": {
                    worker.url: {"kv_mode": worker.kv_mode, "kv_reason": worker.kv_reason}
                    for worker in services.fleet.workers
                    if worker.kv_events != "off"
                },
                "upgrade": services.upgrade(),
                "launch": services.launcher.status() if services.launcher else [],
                "discovery": discovery_rows(services),
                "cluster": services.cluster.status() if services.cluster else None,
                "picker": services.picker.status() if services.picker else None,
            }
        )

    def _summary(self, summary: dict[str, object], status: int) -> Response:
        if not self._keys.presented():
            summary = {name: value for name, value in summary.items() if name not in PRIVATE}
        return json_response(summary, status)


class ConfigRoutes:
    def __init__(self, config_store: ConfigStore) -> None:
        self._config_store = config_store

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/config", "config", self.show)
        app.add_url_rule("/reload", "reload", self.reload, methods=["POST"])

    async def show(self) -> Response:
        config_store = self._config_store
        payload = {
            "revision": config_store.revision,
            "config": redacted(config_store.config),
            "last_reload": config_store.last_reload,
        }
        return json_response(payload, headers=etag(config_store.revision))

    async def reload(self) -> Response:
        reloaded = await self._config_store.reload("http", if_match())
        raise_on_mismatch(reloaded)
        if reloaded.error is not None:
            raise HttpError(
                422,
                str(reloaded.error),
                "config_refused",
                outcome=reloaded.outcome,
                revision=reloaded.revision,
                refused=reloaded.error.as_dict(),
            ).with_headers(*etag(reloaded.revision).items())
        payload = {
            "outcome": reloaded.outcome,
            "revision": reloaded.revision,
            "diff": reloaded.diff,
        }
        return json_response(payload, headers=etag(reloaded.revision))


class KeyRoutes:
    """The callers of model routes: their limits and usage, and adding and removing keys. Clients
    send only the hash of a key, and responses contain neither; entries of FILE are only shown."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._changes = FleetChanges(services)

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/keys", "keys", self.show)
        app.add_url_rule("/keys", "add_key", self.add, methods=["POST"])
        app.add_url_rule("/keys/<path:caller>", "remove_key", self.remove, methods=["DELETE"])

    async def show(self) -> Response:
        services = self._services
        return json_response(
            {
                "keys": key_records(services),
                **key_refusals(services),
                "error": services.keys_error() or None,
            }
        )

    async def add(self) -> Response:
        """Add a key. It is valid in all processes when the response is sent."""
        try:
            key = read_saved_key(await json_object())
            await self._changes.change(partial(with_key, key), at_once=True)
        except KeyRefused as refused:
            raise bad_request(str(refused)) from None
        except KeyKnown as known:
            raise HttpError(409, str(known), "caller_already_exists") from None
        _log.info("caller_key_added name=%s", key.name)
        return self._done(key.name)

    async def remove(self, caller: str) -> Response:
        """Remove a key. Its requests in flight continue, further ones are refused."""

        def edit(state: SavedState, config: Config) -> SavedState:
            try:
                return without_key(state, caller)
            except KeyError:
                raise _not_here(caller, config) from None

        await self._changes.change(edit, at_once=True)
        _log.info("caller_key_removed name=%s", caller)
        return self._done(caller)

    def _done(self, name: str) -> Response:
        store = self._services.config_store
        body = {"status": "ok", "name": name, "key_required": _key_required(store.config)}
        return json_response(body, headers=etag(store.revision))


def _key_required(config: Config) -> bool:
    """Whether model routes are closed to requests without a key."""
    return bool(config.server.api_key or config.keys)


def _not_here(name: str, config: Config) -> HttpError:
    if any(entry.name == name for entry in config.keys):
        message = f"{name} is in the configuration file: remove its [[keys]] entry there"
        return HttpError(409, message, "caller_in_file")
    return HttpError(404, f"there is no caller {name}", "unknown_caller")
