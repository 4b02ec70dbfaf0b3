"""The feed: the state of the proxy once a second, for the dashboard and `omni-proxy top`.

Invariant: a reader costs the bytes of one snapshot and delays nothing; the number of readers is
bounded, and none of them delays a shutdown.
"""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Self

import trio
from quart import Quart, Response, request
from quart.wrappers.response import ResponseBody

from omni_proxy.admin_api.serializers.feed_snapshot import Snapshots
from omni_proxy.admin_api.services import Services
from omni_proxy.wire.errors import HttpError

READERS = 32
PERIOD_SECS = 1.0
RETRY = b"retry: 2000\n"  # ms until a browser that was cut off tries again


class Places:
    """How many readers there may be, and are."""

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
    """A body that holds one of the places while it is being sent.

    No generator: of one that is left in the middle nobody can say when it ends.
    """

    def __init__(self, places: Places) -> None:
        self._places = places

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
    def __init__(self, places: Places, services: Services, snapshots: Snapshots) -> None:
        super().__init__(places)
        self._services = services
        self._snapshots = snapshots
        self._seen = 0  # the newest second that this reader has been told
        self._due = 0.0

    async def __anext__(self) -> bytes:
        begins = not self._due
        if not begins:
            await trio.sleep_until(self._due)
            if self._services.data_plane.draining:
                raise StopAsyncIteration
        self._due = trio.current_time() + PERIOD_SECS
        snapshot, self._seen = self._snapshots.with_history(self._seen)
        return b"%bdata: %b\n\n" % (RETRY if begins else b"", snapshot)


class FeedRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._snapshots = Snapshots(services)
        self._places = Places(READERS, "too_many_readers")

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/feed", "feed", self.feed)

    async def feed(self) -> Response:
        if request.args.get("once", "").lower() in ("true", "1", "yes"):
            return Response(self._snapshots.now(), content_type="application/json")
        self._places.refuse_past_bound()
        response = Response(b"", content_type="text/event-stream")
        response.headers.remove("Content-Length")
        response.headers["Cache-Control"] = "no-store"
        response.response = _Events(self._places, self._services, self._snapshots)
        return response
