"""The admin key: what a request to an admin route must present (api-server.md 2.1).

Invariant: a body that is no JSON is a 422 before the key is asked for; the key comes before all
else that is wrong with a body, its absence included. Keys are compared in constant time.
"""

from __future__ import annotations

import hmac
from typing import Any

from quart import request

from omni_proxy.replica.api.errors import Refused
from omni_proxy.replica.api.fields import json_body
from omni_proxy.replica.api.served import Served


def require_key(served: Served) -> None:
    """Raises Refused 401 where a due key is missing or malformed, 403 where it is wrong."""
    if not served.admin_api_key:
        return
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    # Header bytes are decoded as latin-1: this gives back what came over the wire.
    given = token.strip().encode("latin-1", "replace")
    if scheme.lower() != "bearer" or not given:
        told = "Admin API key required: Authorization: Bearer <key>"
        raise Refused(401, told, {"www-authenticate": "Bearer"})
    if not hmac.compare_digest(given, served.admin_api_key.encode()):
        raise Refused(403, "Invalid admin API key")


async def admin_body(served: Served) -> Any:
    """The JSON value of an admin request that may be served, or MISSING; to be given to `read`."""
    body = await json_body()
    require_key(served)
    return body
