"""GET /dashboard: the page, and the feed of the proxy's state, once a second, that it and
`omni-proxy top` read.

Invariants: the parts in pages/dashboard become one page, the same bytes for every client, so it
needs no key; its policy allows its own inline script and style, by their hashes, and nothing else.
The page requests its data itself, with the key that the user enters. A reader of the feed costs the
bytes of one snapshot and delays no other; their number is bounded, and none delays a shutdown.
"""

from __future__ import annotations

import base64
import hashlib
import re
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import TracebackType
from typing import Final, Self

import trio
from quart import Quart, Response, request
from quart.wrappers.response import ResponseBody

from omni_proxy.admin_api.access.key_check import KeyCheck
from omni_proxy.admin_api.access.roles import ALL
from omni_proxy.admin_api.serializers.feed_snapshot import Snapshots
from omni_proxy.admin_api.services import Services
from omni_proxy.wire.errors import HttpError

STYLES: Final = ("base.css", "table.css", "charts.css", "narrow.css")
# A part may call functions of later parts, but not use their values.
SCRIPTS: Final = (
    "dom.js", "access.js", "feed.js", "standing.js", "cluster.js", "overview.js", "charts.js",
    "workers.js", "actions.js", "weights.js", "config.js", "requests.js", "callers.js",
    "explain.js", "playground.js", "keyboard.js", "begin.js",
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
RETRY = b"retry: 2000\n"  # ms until a disconnected browser reconnects


class Places:
    """Counts the readers and bounds their number."""

    def __init__(self, most: int, code: str) -> None:
        self.taken = 0
        self._most = most
        self._code = code

    def refuse_past_bound(self) -> None:
        if self.taken >= self._most:
            message = f"{self.taken} readers are served already"
            refusal = HttpError(503, message, self._code)
            raise refusal.with_headers(("retry-after", "2"))


class Body(ResponseBody):
    """A body that occupies a stream slot while it is sent.

    Not a generator: an abandoned generator is closed at an undefined time.
    """

    def __init__(self, stream_slots: Places) -> None:
        self._places = stream_slots

    async def __aenter__(self) -> Self:
        self._places.taken += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._places.taken -= 1

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes: ...


class _Events(Body):
    def __init__(
        self,
        stream_slots: Places,
        services: Services,
        snapshots: Snapshots,
        reader: Mapping[str, object],
    ) -> None:
        super().__init__(stream_slots)
        self._reader = reader
        self._services = services
        self._snapshots = snapshots
        self._seen = 0  # the newest second that was sent to this reader
        self._due = 0.0

    async def __anext__(self) -> bytes:
        begins = not self._due
        if not begins:
            await trio.sleep_until(self._due)
            if self._services.data_plane.draining:
                raise StopAsyncIteration
        self._due = trio.current_time() + PERIOD_SECS
        snapshot, self._seen = self._snapshots.with_history(self._seen, self._reader)
        return b"%bdata: %b\n\n" % (RETRY if begins else b"", snapshot)


class FeedRoutes:
    def __init__(self, services: Services, keys: KeyCheck) -> None:
        self._services = services
        self._keys = keys
        self._snapshots = Snapshots(services)
        self._places = Places(READERS, "too_many_readers")

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/feed", "feed", self.feed)

    async def feed(self) -> Response:
        holder = self._keys.holder()
        # Without a key the proxy requires none, so the reader may do everything.
        role = holder.role if holder is not None else ALL
        reader = {"reader": {"name": holder.name if holder is not None else None, "role": role}}
        if request.args.get("once", "").lower() in ("true", "1", "yes"):
            return Response(self._snapshots.now(reader), content_type="application/json")
        self._places.refuse_past_bound()
        response = Response(b"", content_type="text/event-stream")
        response.headers.remove("Content-Length")
        response.headers["Cache-Control"] = "no-store"
        response.response = _Events(self._places, self._services, self._snapshots, reader)
        return response
