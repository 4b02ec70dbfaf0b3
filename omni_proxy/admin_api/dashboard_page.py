"""Builds the dashboard's page from its parts in pages/dashboard, and its content security policy.

Invariant: the parts become one page without external assets, the same bytes for every client. Its
policy allows its own inline script and style, by their hashes, and nothing else. There is one
script: its parts share a scope and are always of the same version, whatever a browser has cached.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Final

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
