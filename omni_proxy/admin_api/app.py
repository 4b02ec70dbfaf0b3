"""The Quart application of the admin API: its routes, and hooks that apply to all of them.

Must not hold state that outlives it: a restart of the service makes a new application.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace
from quart import Response, has_request_context, request
from quart_trio import QuartTrio

from omni_proxy.admin_api.access.audit_log import AuditLog
from omni_proxy.admin_api.access.cors import OpenReads
from omni_proxy.admin_api.access.key_check import KeyCheck
from omni_proxy.admin_api.openapi_document import OpenApiRoutes
from omni_proxy.admin_api.responses import add_json_errors
from omni_proxy.admin_api.routes.config_routes import ConfigRoutes
from omni_proxy.admin_api.routes.explain_routes import ExplainRoutes
from omni_proxy.admin_api.routes.health_routes import FleetHealthRoutes
from omni_proxy.admin_api.routes.key_routes import KeyRoutes
from omni_proxy.admin_api.routes.models_routes import MergedModelRoutes
from omni_proxy.admin_api.routes.monitoring.dashboard_routes import DashboardRoutes
from omni_proxy.admin_api.routes.monitoring.feed_routes import FeedRoutes
from omni_proxy.admin_api.routes.monitoring.history_routes import HistoryRoutes
from omni_proxy.admin_api.routes.monitoring.metrics_routes import MetricsRoutes
from omni_proxy.admin_api.routes.operations.abort_routes import FleetAbortRoutes
from omni_proxy.admin_api.routes.operations.broadcast_routes import BroadcastRoutes
from omni_proxy.admin_api.routes.operations.engine_routes import EngineRoutes
from omni_proxy.admin_api.routes.operations.rl_routes import RlRoutes
from omni_proxy.admin_api.routes.operations.rollout_routes import RolloutRoutes
from omni_proxy.admin_api.routes.operations.weight_routes import (
    WeightOperationRoutes,
    WeightVersionRoutes,
)
from omni_proxy.admin_api.routes.picker_routes import PickerRoutes
from omni_proxy.admin_api.routes.session_routes import SessionRoutes
from omni_proxy.admin_api.routes.status_routes import StatusRoutes
from omni_proxy.admin_api.routes.workers.drain_routes import DrainRoutes
from omni_proxy.admin_api.routes.workers.sglang_worker_routes import SglangWorkerRoutes
from omni_proxy.admin_api.routes.workers.worker_routes import WorkerRoutes
from omni_proxy.admin_api.selector_resolution import SelectorResolver
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords, reasons
from omni_proxy.admin_api.services import Services
from omni_proxy.admin_api.worker_requests import WorkerNotes
from omni_proxy.config.state import DisabledBy
from omni_proxy.upstream_http.client import incoming_hops
from omni_proxy.url_rules import match_only
from omni_proxy.weight_sync.protocol.journal import PauseRecord
from omni_proxy.wire.forwarded import HOP_FIELD, PROXY_FIELD


def create_app(services: Services) -> QuartTrio:
    app = QuartTrio(__name__, static_folder=None)
    match_only(app)
    app.config["RESPONSE_TIMEOUT"] = None  # Quart's default of 60 s would cut a long response
    app.config["MAX_CONTENT_LENGTH"] = None  # the data plane limits the body
    app.url_map.merge_slashes = False  # a worker id has "//", and a redirect would lose the body
    keys = KeyCheck(services.config_store, services.find_admin_key, relays=services.relays)
    pauses = partial(_visible_pauses, services, keys)
    notes = WorkerNotes(services.fleet, gateway_ids=services.dialect == "sglang")
    disabled_by = partial(_visible_disablers, services, keys)
    records = WorkerRecords(
        services, notes, lambda: reasons(services, pauses(), disabled_by()), pauses, disabled_by
    )
    selectors = SelectorResolver(services, records)
    AuditLog(services.write_audit, keys.changes_something, keys.holder_name).mount(app)
    app.before_request(keys.before_request)
    OpenReads(services.config_store).mount(app)
    _forward_hops(app, services.proxy_id)
    add_json_errors(app)
    for routes in (
        FleetHealthRoutes(services, keys, records),
        StatusRoutes(services),
        WorkerRoutes(services, records, notes, drains := DrainRoutes(services, records)),
        drains,
        FeedRoutes(services, keys),
        KeyRoutes(services),
        MetricsRoutes(services),
        HistoryRoutes(services),
        ConfigRoutes(services.config_store),
        MergedModelRoutes(services),
        SglangWorkerRoutes(services),
        EngineRoutes(services, selectors),
        ExplainRoutes(services),
        PickerRoutes(services),
        SessionRoutes(services),
        DashboardRoutes(),
        OpenApiRoutes(),
        BroadcastRoutes(services, selectors),
        FleetAbortRoutes(services),
        WeightOperationRoutes(services),
        WeightVersionRoutes(services),
        RolloutRoutes(services, selectors),
        RlRoutes(services, records, selectors),
    ):
        routes.mount(app)
    return app


def _visible_pauses(services: Services, keys: KeyCheck) -> dict[str, PauseRecord]:
    """The pauses by worker URL; without the admin key, without their callers."""
    pauses = services.weight_operations.journal.pauses()
    if not pauses or (has_request_context() and keys.presented()):
        return pauses
    return {url: replace(pause, by="") for url, pause in pauses.items()}


def _visible_disablers(services: Services, keys: KeyCheck) -> Mapping[str, DisabledBy]:
    """Like `_visible_pauses`, for the callers that disabled workers."""
    records = services.config_store.state.disabled_by
    if not records or (has_request_context() and keys.presented()):
        return records
    return {url: DisabledBy(at=record.at) for url, record in records.items()}


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
