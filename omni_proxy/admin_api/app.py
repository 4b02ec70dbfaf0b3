"""The Quart application of the admin API: its routes, and hooks that apply to all of them.

Must not hold state that outlives it: a restart of the service makes a new application.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

from quart import Quart, Response, request
from quart_trio import QuartTrio

from omni_proxy.admin_api.access.audit_log import AuditLog
from omni_proxy.admin_api.access.browser_checks import OpenReads
from omni_proxy.admin_api.access.key_check import KeyCheck
from omni_proxy.admin_api.fleet_changes import FleetChanges
from omni_proxy.admin_api.openapi_document import OpenApiRoutes
from omni_proxy.admin_api.responses import add_json_errors
from omni_proxy.admin_api.routes.config_routes import ConfigRoutes
from omni_proxy.admin_api.routes.dashboard_routes import DashboardRoutes, FeedRoutes, HistoryRoutes
from omni_proxy.admin_api.routes.explain_routes import ExplainRoutes
from omni_proxy.admin_api.routes.health_routes import FleetHealthRoutes
from omni_proxy.admin_api.routes.key_routes import KeyRoutes
from omni_proxy.admin_api.routes.metrics_routes import MetricsRoutes
from omni_proxy.admin_api.routes.models_routes import MergedModelRoutes
from omni_proxy.admin_api.routes.operations.abort_routes import FleetAbortRoutes
from omni_proxy.admin_api.routes.operations.engine_routes import EngineRoutes
from omni_proxy.admin_api.routes.operations.rl_routes import RlRoutes
from omni_proxy.admin_api.routes.operations.rollout_routes import RolloutRoutes
from omni_proxy.admin_api.routes.operations.weight_routes import (
    BroadcastRoutes,
    WeightStateRoutes,
    WeightVersionRoutes,
)
from omni_proxy.admin_api.routes.picker_routes import PickerRoutes
from omni_proxy.admin_api.routes.session_routes import SessionRoutes
from omni_proxy.admin_api.routes.sglang_worker_routes import SglangWorkerRoutes
from omni_proxy.admin_api.routes.status_routes import StatusRoutes
from omni_proxy.admin_api.routes.worker_routes import DrainRoutes, WorkerRoutes
from omni_proxy.admin_api.selector_resolution import SelectorResolver
from omni_proxy.admin_api.serializers.feed_snapshot import Snapshots
from omni_proxy.admin_api.serializers.readiness import Readiness
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords, visible_operator_state
from omni_proxy.admin_api.services import Services
from omni_proxy.admin_api.worker_requests import WorkerNotes
from omni_proxy.shared.asgi.url_rules import match_only
from omni_proxy.upstream_http.client import incoming_hops
from omni_proxy.wire.forwarded import HOP_FIELD, PROXY_FIELD


def create_app(services: Services) -> QuartTrio:
    app = QuartTrio(__name__, static_folder=None)
    match_only(app)
    app.config["RESPONSE_TIMEOUT"] = None  # Quart's default of 60 s would cut a long response
    app.config["MAX_CONTENT_LENGTH"] = None  # the data plane limits the body
    app.url_map.merge_slashes = False  # a worker id has "//", and a redirect would lose the body
    config_store = services.config_store
    relays = not config_store.startup.picker
    keys = KeyCheck(config_store, services.keys.find_admin_key, relays=relays)
    write_audit = services.telemetry.write_audit
    AuditLog(write_audit, keys.changes_something, keys.holder_name).mount(app)
    app.before_request(keys.before_request)
    OpenReads(config_store).mount(app)
    _forward_hops(app, services.process.proxy_id)
    add_json_errors(app)
    records = _worker_records(services, keys)
    for routes in (
        *_monitoring_routes(services, keys, records),
        *_worker_routes(services, records),
        *_operation_routes(services, records),
        *_other_routes(services),
    ):
        routes.mount(app)
    return app


class Routes(Protocol):
    def mount(self, app: Quart) -> None: ...


def _worker_records(services: Services, keys: KeyCheck) -> WorkerRecords:
    workers, config_store = services.workers, services.config_store
    gateway_ids = config_store.startup.dialect == "sglang"
    journal = services.weight_operations.journal
    return WorkerRecords(
        workers,
        services.data_plane,
        services.telemetry.instruments.metrics,
        WorkerNotes(workers.fleet, gateway_ids=gateway_ids),
        partial(visible_operator_state, journal, config_store, keys.presented),
    )


def _monitoring_routes(
    services: Services, keys: KeyCheck, records: WorkerRecords
) -> Iterator[Routes]:
    fleet, data_plane = services.workers.fleet, services.data_plane
    history = services.telemetry.instruments.history
    readiness = Readiness(services)
    yield FleetHealthRoutes(readiness, records, keys, fleet, data_plane)
    yield StatusRoutes(services, readiness)
    yield FeedRoutes(Snapshots(services, readiness), data_plane, keys)
    yield MetricsRoutes(services, readiness)
    yield HistoryRoutes(fleet, services.config_store, history)
    yield DashboardRoutes()


def _worker_routes(services: Services, records: WorkerRecords) -> Iterator[Routes]:
    workers, config_store = services.workers, services.config_store
    changes = FleetChanges(workers.fleet, config_store, services.data_plane)
    drains = DrainRoutes(workers, config_store, records)
    yield drains
    yield WorkerRoutes(workers, config_store, records, changes, drains)
    yield SglangWorkerRoutes(workers, config_store, changes)


def _operation_routes(services: Services, records: WorkerRecords) -> Iterator[Routes]:
    fleet, config_store = services.workers.fleet, services.config_store
    operations, data_plane = services.weight_operations, services.data_plane
    selectors = SelectorResolver(fleet, config_store, records)
    refresh_adapters = services.workers.refresh_adapters
    yield EngineRoutes(fleet, config_store, operations, selectors)
    yield BroadcastRoutes(operations, config_store, selectors, refresh_adapters)
    yield FleetAbortRoutes(fleet, config_store, data_plane)
    yield WeightStateRoutes(operations)
    yield WeightVersionRoutes(operations)
    yield RolloutRoutes(operations, data_plane, selectors)
    yield RlRoutes(fleet, operations, records, selectors)


def _other_routes(services: Services) -> Iterator[Routes]:
    fleet, config_store = services.workers.fleet, services.config_store
    data_plane, keys = services.data_plane, services.keys
    recent = services.telemetry.instruments.recent
    started_at = services.process.started_at
    yield ConfigRoutes(config_store)
    yield KeyRoutes(keys, config_store)
    yield MergedModelRoutes(fleet, config_store, data_plane, keys.find_caller, started_at)
    yield ExplainRoutes(fleet, config_store, data_plane, recent)
    yield PickerRoutes(services.picker)
    yield SessionRoutes(data_plane)
    yield OpenApiRoutes()


def _forward_hops(app: QuartTrio, proxy_id: str) -> None:
    """Identify the proxy in responses, and carry the hop header of a request into calls to
    workers."""

    async def record_hops() -> None:
        incoming_hops.set(", ".join(request.headers.getlist(HOP_FIELD)))

    async def add_proxy_id(response: Response) -> Response:
        if proxy_id:
            response.headers[PROXY_FIELD] = proxy_id
        return response

    app.before_request(record_hops)
    app.after_request(add_proxy_id)
