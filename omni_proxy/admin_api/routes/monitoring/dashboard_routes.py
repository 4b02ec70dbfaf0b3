"""GET /dashboard: the page.

Invariants: the parts in pages/dashboard become one page, the same bytes for every client, so it
needs no key; its policy allows its own inline script and style, by their hashes, and nothing else.
The page requests its data itself, with the key that the user enters.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Final

from quart import Quart, Response, request

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
