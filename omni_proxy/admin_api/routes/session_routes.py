"""POST /finish_session of vllm-router: ends a sticky session. It is idempotent."""

from __future__ import annotations

from urllib.parse import parse_qs

from quart import Quart, Response, request

from omni_proxy.admin_api.responses import json_response
from omni_proxy.admin_api.services import DataPlaneView
from omni_proxy.routing.inspect.affinity_key import session_key
from omni_proxy.wire.errors import bad_request


class SessionRoutes:
    """Ends a sticky session, which then no longer counts as load (note:features 6).

    Answers immediately, without a lock and without waiting for a worker. It needs no key: a client
    that has a session's id can also send requests of that session.
    """

    def __init__(self, data_plane: DataPlaneView) -> None:
        self._data_plane = data_plane

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/finish_session", "finish_session", self.finish, methods=["POST"])

    async def finish(self) -> Response:
        # The raw bytes: they give the same key as the same bytes in a header.
        query = parse_qs(request.query_string.decode("latin-1"), encoding="latin-1")
        value = query.get("session_id", [""])[0].strip(" \t").encode("latin-1")
        if not value:
            raise bad_request("name the session: POST /finish_session?session_id=ID")
        finished = self._data_plane.finish_session(session_key(value))
        return json_response({"session_id": value.decode("utf-8", "replace"), "finished": finished})
