"""POST /abort_request: SGLang's way to end requests from outside.

`{"rid"}` names one request, with all choices and prompts of it; `{"rid", "prefix": true}` all whose
id begins so; `{"abort_all": true}` all. Ended requests are answered with what they have,
`finish_reason` abort. An unknown id is no error: it may have ended a moment ago.
"""

from __future__ import annotations

from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, empty_response
from omni_proxy.replica.api.common.lenient_decode import validate
from omni_proxy.replica.api.native.admin_operations import admin_body
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.vllm.engine_calls import id_matcher


class AbortBody(Struct, kw_only=True):
    rid: str | None = None
    prefix: bool | None = None
    abort_all: bool | None = None


class AbortRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def abort(self) -> Response:
        body = validate(AbortBody, await admin_body(self._context))
        client, rid = self._context.client, body.rid
        if body.abort_all:
            client.end_early(lambda _: True)
        elif not rid:
            raise DetailError(400, "give a rid, with prefix: true for all that begin so, or "
                              "abort_all: true")  # fmt: skip
        elif body.prefix:
            client.end_early(lambda request_id: request_id.startswith(rid))
        else:
            client.end_early(id_matcher([rid]))
        return empty_response()


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = AbortRoutes(context)
    app.add_url_rule("/abort_request", "abort_request", routes.abort, methods=["POST"])
