"""The front's app: its routes, and what holds for all of them."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace
from quart import Response, has_request_context, request
from quart_trio import QuartTrio

from omni_proxy.control.journal import Pause
from omni_proxy.front.admin import AdminRoutes
from omni_proxy.front.auth import KeyCheck
from omni_proxy.front.chosen import Chosen
from omni_proxy.front.config import ConfigRoutes
from omni_proxy.front.cors import OpenReads
from omni_proxy.front.dashboard import DashboardRoutes
from omni_proxy.front.draining import DrainRoutes
from omni_proxy.front.engines import EngineRoutes
from omni_proxy.front.explain import ExplainRoutes
from omni_proxy.front.feed import FeedRoutes
from omni_proxy.front.metrics import MetricsRoutes
from omni_proxy.front.models import ModelRoutes
from omni_proxy.front.openapi import OpenApiRoutes
from omni_proxy.front.pool import PoolRoutes
from omni_proxy.front.reasons import reasons
from omni_proxy.front.records import Records
from omni_proxy.front.replies import speak_json
from omni_proxy.front.rl import RlRoutes
from omni_proxy.front.rooms import Rooms
from omni_proxy.front.scaling import ScalingRoutes
from omni_proxy.front.versions import VersionRoutes
from omni_proxy.front.weights import WeightRoutes
from omni_proxy.front.workers import WorkerRoutes
from omni_proxy.watch.calls import came_by
from omni_proxy.wire.hops import HOP_FIELD, PROXY_FIELD


def create_app(rooms: Rooms) -> QuartTrio:
    app = QuartTrio(__name__, static_folder=None)
    app.config["RESPONSE_TIMEOUT"] = None  # Quart's 60 s end a long answer without a word
    app.config["MAX_CONTENT_LENGTH"] = None  # the door has bounded the body
    app.url_map.merge_slashes = False  # a worker id holds "//", and a redirect would lose the body
    keys = KeyCheck(rooms.keeper)
    pauses = partial(_pauses_told, rooms, keys)
    records = Records(rooms.fleet, rooms.drains, lambda: reasons(rooms, pauses()), pauses)
    chosen = Chosen(rooms, records)
    app.before_request(keys.before_request)
    OpenReads(rooms.keeper).mount(app)
    _pass_hops_on(app, rooms.proxy_id)
    speak_json(app)
    for routes in (
        PoolRoutes(rooms, keys, records),
        WorkerRoutes(rooms, records, drains := DrainRoutes(rooms, records)),
        drains,
        FeedRoutes(rooms),
        MetricsRoutes(rooms),
        ConfigRoutes(rooms.keeper),
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


def _pauses_told(rooms: Rooms, keys: KeyCheck) -> dict[str, Pause]:
    """Who has no key may read workers' records, and learns from them nothing of who paused."""
    found = rooms.desk.book.pauses()
    if not found or (has_request_context() and keys.presented()):
        return found
    return {url: replace(pause, by="") for url, pause in found.items()}


def _pass_hops_on(app: QuartTrio, proxy_id: str) -> None:
    """Say who answers, and let what is asked of workers carry the marks of the request."""

    async def note() -> None:
        came_by.set(", ".join(request.headers.getlist(HOP_FIELD)))

    async def sign(response: Response) -> Response:
        if proxy_id:
            response.headers[PROXY_FIELD] = proxy_id
        return response

    app.before_request(note)
    app.after_request(sign)
