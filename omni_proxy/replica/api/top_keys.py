"""`success`, `message` and `status` at the top of refusals of operations, where trainers look.

Invariant: they stand beside what the contract has there (`detail`, `error`) and change none of it.
Answers that are no JSON stay as they are (api-server.md 9.1).
"""

from __future__ import annotations

import msgspec
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api import admin, weights
from omni_proxy.replica.api.served import Served

PATHS = frozenset(
    route.path
    for route in (*admin.ROUTES, *weights.ROUTES, weights.FROM_TENSOR, weights.NAME_VERSION)
)


async def add(response: Response) -> Response:
    if response.status_code < 400 or request.path not in PATHS or not response.is_json:
        return response
    told = msgspec.json.decode(await response.get_data())
    words = told["error"]["message"] if "error" in told else admin.message_of(told["detail"])
    top = {"success": False, "message": words, "status": "error"}
    response.set_data(msgspec.json.encode(top | told))
    return response


def mount(app: QuartTrio, _: Served) -> None:
    app.after_request(add)
