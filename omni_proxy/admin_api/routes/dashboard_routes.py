"""GET /dashboard: one self-contained page, without any data of this proxy.

Invariant: the page is the same bytes for every client, so it needs no key. It requests its data
itself, with the key that its reader enters. Its content security policy allows only what is inside
the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from quart import Quart, Response, request

PAGE = "dashboard.html"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class DashboardRoutes:
    def mount(self, app: Quart) -> None:
        app.add_url_rule("/dashboard", "dashboard", self.show)

    async def show(self) -> Response:
        body, headers = _page()
        answer = Response(body, 200, headers, content_type="text/html; charset=utf-8")
        # Asked for anew each time, sent only when it is another one: an upgrade shows at once.
        answer.set_etag(hashlib.sha256(body).hexdigest()[:32])
        await answer.make_conditional(request)
        return answer


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    body = (files("omni_proxy.admin_api") / "pages" / PAGE).read_bytes()
    return body, {
        "Content-Security-Policy": policy(body.decode()),
        "X-Frame-Options": "DENY",  # its buttons take workers out: nobody may lay a page over them
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def policy(page: str) -> str:
    """A Content-Security-Policy that allows the inline parts of this very page and our own API."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",  # its icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
