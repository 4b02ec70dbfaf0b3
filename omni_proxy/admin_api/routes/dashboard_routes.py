"""GET /dashboard, the page, and what it reads: GET /feed, the state of the proxy once a second,
which `omni-proxy top` reads, too, and GET /history, series of the last hours.

Invariants: the parts in pages/dashboard become one page, the same bytes for every client, so it
needs no key; its policy allows its own inline script and style, by their hashes, and nothing else.
The page requests its data itself, with the key that the user enters. A reader of the feed costs the
bytes of one snapshot and delays no other; their number is bounded, and none delays a shutdown.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

import trio
from quart import Quart, Response, request

from omni_proxy.admin_api.access.key_check import KeyCheck
from omni_proxy.admin_api.access.roles import ALL
from omni_proxy.admin_api.fleet_changes import find_worker
from omni_proxy.admin_api.responses import RETRY, Body, ReaderLimit, json_response, query_flag
from omni_proxy.admin_api.serializers.feed_snapshot import Snapshots
from omni_proxy.admin_api.services import DataPlaneView
from omni_proxy.fleet.registry import Fleet
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.telemetry.history import SERIES, STEPS, History, Track, start_of
from omni_proxy.wire.errors import bad_request

STYLES: Final = ("base.css", "table.css", "charts.css", "responsive.css")
# A part may call functions of later parts, but not use their values.
SCRIPTS: Final = (
    "dom.js", "format.js", "access.js", "feed.js", "worker_state.js", "cluster.js", "overview.js",
    "charts.js", "workers.js", "actions.js", "weights.js", "config.js", "requests.js",
    "callers.js", "explain.js", "chat.js", "keyboard.js", "start.js",
)  # fmt: skip
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def dashboard_page() -> str:
    folder = files("omni_proxy.admin_api") / "pages" / "dashboard"

    def joined(names: tuple[str, ...]) -> str:
        return "".join((folder / name).read_text() for name in names)

    page = (folder / "page.html").read_text()
    page = page.replace("<style></style>", f"<style>\n{joined(STYLES)}</style>", 1)
    script = f'<script>\n"use strict";\n{joined(SCRIPTS)}</script>'
    return page.replace("<script></script>", script, 1)


def content_security_policy(page: str) -> str:
    """A policy that allows the inline parts of this page and its own API."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",  # the page's icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


class DashboardRoutes:
    def mount(self, app: Quart) -> None:
        app.add_url_rule("/dashboard", "dashboard", self.show)

    async def show(self) -> Response:
        body, headers = _page()
        response = Response(body, 200, headers, content_type="text/html; charset=utf-8")
        # Revalidated each time, sent only if changed: an upgrade shows immediately.
        response.set_etag(hashlib.sha256(body).hexdigest()[:32])
        await response.make_conditional(request)
        return response


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    page = dashboard_page()
    return page.encode(), {
        "Content-Security-Policy": content_security_policy(page),
        "X-Frame-Options": "DENY",  # against clickjacking: its buttons disable workers
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


READERS = 32
PERIOD_SECS = 1.0


class _Events(Body):
    def __init__(
        self,
        readers: ReaderLimit,
        data_plane: DataPlaneView,
        snapshots: Snapshots,
        reader: Mapping[str, object],
    ) -> None:
        super().__init__(readers)
        self._reader = reader
        self._data_plane = data_plane
        self._snapshots = snapshots
        self._seen = 0  # the newest second that was sent to this reader
        self._due = 0.0

    async def __anext__(self) -> bytes:
        begins = not self._due
        if not begins:
            await trio.sleep_until(self._due)
            if self._data_plane.draining:
                raise StopAsyncIteration
        self._due = trio.current_time() + PERIOD_SECS
        snapshot, self._seen = self._snapshots.with_history(self._seen, self._reader)
        return b"%bdata: %b\n\n" % (RETRY if begins else b"", snapshot)


class FeedRoutes:
    def __init__(self, snapshots: Snapshots, data_plane: DataPlaneView, keys: KeyCheck) -> None:
        self._snapshots = snapshots
        self._data_plane = data_plane
        self._keys = keys
        self._readers = ReaderLimit(READERS, "too_many_readers")

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/feed", "feed", self.feed)

    async def feed(self) -> Response:
        holder = self._keys.holder()
        # Without a key the proxy requires none, so the reader may do everything.
        role = holder.role if holder is not None else ALL
        reader = {"reader": {"name": holder.name if holder is not None else None, "role": role}}
        if query_flag("once"):
            return Response(self._snapshots.now(reader), content_type="application/json")
        self._readers.check_limit()
        response = Response(b"", content_type="text/event-stream")
        response.headers.remove("Content-Length")
        response.headers["Cache-Control"] = "no-store"
        response.response = _Events(self._readers, self._data_plane, self._snapshots, reader)
        return response


HISTORY_SECS: Final = tuple(sorted(STEPS))


class HistoryRoutes:
    """Series of the last hours as JSON, for charts."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore, history: History) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._history = history

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/history", "history", self.show)

    async def show(self) -> Response:
        secs = _range(request.args.get("secs", str(HISTORY_SECS[0])))
        names = _series(request.args.get("series"))
        history, now = self._history, time.time()
        body: dict[str, object] = {
            "secs": secs,
            "step_secs": STEPS[secs],
            "from": start_of(secs, now),
            "metrics": self._config_store.config.server.metrics,
        }
        if request.args.get("by") == "worker":
            rows: list[dict[str, object]] = []
            for worker in self._fleet.workers:
                if (of_worker := history.workers.get(worker)) is not None:
                    row = {name: of_worker.read(secs, name, now) for name in names}
                    rows.append({"id": worker.id, "url": worker.url, "series": row})
                await trio.lowlevel.checkpoint()
            return json_response({**body, "workers": rows})
        if "by" in request.args:
            raise bad_request("by must be worker")
        track = history.fleet
        if (of := request.args.get("of")) is not None:
            if of != "cluster":
                raise bad_request("of must be cluster")
            if history.cluster is None:
                raise bad_request("this proxy is not a member of a cluster")
            track = history.cluster
        if name := request.args.get("worker"):
            worker = find_worker(self._fleet, name)
            track = history.workers.get(worker) or Track()
            body["worker"] = worker.url
        body["series"] = {name: track.read(secs, name, now) for name in names}
        return json_response(body)


def _range(text: str) -> int:
    """Raises HttpError 400."""
    if text not in map(str, HISTORY_SECS):
        raise bad_request(f"secs must be one of {', '.join(map(str, HISTORY_SECS))}")
    return int(text)


def _series(text: str | None) -> tuple[str, ...]:
    """The named series; all without a text. Raises HttpError 400."""
    if text is None:
        return SERIES
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in SERIES]
    if unknown:
        raise bad_request(f"unknown series {unknown[0]!r}; known are {', '.join(SERIES)}")
    return names
