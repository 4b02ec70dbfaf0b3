"""The caller of the current request, by name, for logs and records of operations."""

from __future__ import annotations

from typing import Final

from quart import request

from omni_proxy.admin_api.access.key_check import named_key
from omni_proxy.wire.proxy_protocol import FIELD, peer_host

PEER: Final = FIELD.decode()
PROGRAM_CHARS: Final = 120


def caller() -> str:
    """The caller for logs and records: its program, its address, and the name of its key."""
    agent = _program()
    addresses = request.headers.getlist(PEER)
    text = f"{agent} from {peer_host(addresses[-1])}".strip() if addresses else agent
    return f"{key} ({text})" if (key := named_key()) else text


def _program() -> str:
    """`dashboard` for a page of this proxy, `browser` for other requests of a browser, else the
    first product of the User-Agent (RFC 9110, 10.1.5); "" without one."""
    agent = request.headers.get("User-Agent", "").split()
    if not agent or not agent[0].startswith("Mozilla/"):
        return agent[0][:PROGRAM_CHARS] if agent else ""
    # Control routes refuse pages of other origins. Over plain HTTP to another machine a browser
    # sends only Origin.
    own_page = request.headers.get("Sec-Fetch-Site") == "same-origin" or "Origin" in request.headers
    return "dashboard" if own_page else "browser"
