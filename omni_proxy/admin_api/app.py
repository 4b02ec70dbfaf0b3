"""The front's app: its routes, and what holds for all of them."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace
from quart import Response, has_request_context, request
from quart_trio import QuartTrio

from omni_proxy.admin_api.access.auth import KeyCheck
from omni_proxy.admin_api.access.cors import OpenReads
from omni_proxy.admin_api.openapi.document import OpenApiRoutes
from omni_proxy.admin_api.responses import speak_json
from omni_proxy.admin_api.routes.broadcast_routes import AdminRoutes
from omni_proxy.admin_api.routes.config_routes import ConfigRoutes
from omni_proxy.admin_api.routes.dashboard_routes import DashboardRoutes
from omni_proxy.admin_api.routes.drain_routes import DrainRoutes
from omni_proxy.admin_api.routes.engine_routes import EngineRoutes
from omni_proxy.admin_api.routes.explain_routes import ExplainRoutes
from omni_proxy.admin_api.routes.feed_routes import FeedRoutes
from omni_proxy.admin_api.routes.health_routes import PoolRoutes
from omni_proxy.admin_api.routes.metrics_routes import MetricsRoutes
from omni_proxy.admin_api.routes.models_routes import ModelRoutes
from omni_proxy.admin_api.routes.rl_routes import RlRoutes
from omni_proxy.admin_api.routes.sglang_routes import ScalingRoutes
from omni_proxy.admin_api.routes.weight_routes import VersionRoutes, WeightRoutes
from omni_proxy.admin_api.routes.worker_routes import WorkerRoutes
from omni_proxy.admin_api.selector_resolution import SelectorResolver
from omni_proxy.admin_api.serializers.unroutable_reason import reasons
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords
from omni_proxy.admin_api.services import Services
from omni_proxy.admin_api.worker_notes import WorkerNotes
from omni_proxy.upstream_http.client import incoming_hops
from omni_proxy.weight_sync.protocol.journal import PauseRecord
from omni_proxy.wire.proxy_headers import HOP_FIELD, PROXY_FIELD


def create_app(rooms: Services) -> QuartTrio:
    app = QuartTrio(__name__, static_folder=None)
    app.config["RESPONSE_TIMEOUT"] = None  # Quart's 60 s end a long answer without a word
    app.config["MAX_CONTENT_LENGTH"] = None  # the door has bounded the body
    app.url_map.merge_slashes = False  # a worker id holds "//", and a redirect would lose the body
    keys = KeyCheck(rooms.config_store)
    pauses = partial(_pauses_told, rooms, keys)
    notes = WorkerNotes(rooms.fleet)
    records = WorkerRecords(
        rooms.fleet, rooms.drains, notes, lambda: reasons(rooms, pauses()), pauses
    )
    chosen = SelectorResolver(rooms, records)
    app.before_request(keys.before_request)
    OpenReads(rooms.config_store).mount(app)
    _pass_hops_on(app, rooms.proxy_id)
    speak_json(app)
    for routes in (
        PoolRoutes(rooms, keys, records),
        WorkerRoutes(rooms, records, notes, drains := DrainRoutes(rooms, records)),
        drains,
        FeedRoutes(rooms),
        MetricsRoutes(rooms),
        ConfigRoutes(rooms.config_store),
        ModelRoutes(rooms),
        ScalingRoutes(rooms),
        EngineRoutes(rooms, chosen),
        ExplainRoutes(rooms),
        DashboardRoutes(),
        OpenApiRoutes(),
        AdminRoutes(rooms, chosen),
        WeightRoutes(rooms),
        VersionRoutes(rooms),
        RlRoutes(rooms, records, chosen),
    ):
        routes.mount(app)
    return app


def _pauses_told(rooms: Services, keys: KeyCheck) -> dict[str, PauseRecord]:
    """Who has no key may read workers' records, and learns from them nothing of who paused."""
    found = rooms.desk.journal.pauses()
    if not found or (has_request_context() and keys.presented()):
        return found
    return {url: replace(pause, by="") for url, pause in found.items()}


def _pass_hops_on(app: QuartTrio, proxy_id: str) -> None:
    """Say who answers, and let what is asked of workers carry the marks of the request."""

    async def note() -> None:
        incoming_hops.set(", ".join(request.headers.getlist(HOP_FIELD)))

    async def sign(response: Response) -> Response:
        if proxy_id:
            response.headers[PROXY_FIELD] = proxy_id
        return response

    app.before_request(note)
    app.after_request(sign)
