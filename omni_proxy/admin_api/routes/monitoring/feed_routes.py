"""GET /feed: the state of the proxy, once a second, that the dashboard and `omni-proxy top` read.

Invariant: a reader of the feed costs the bytes of one snapshot and delays no other; their number is
bounded, and none delays a shutdown.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio
from quart import Quart, Response

from omni_proxy.admin_api.access.key_check import KeyCheck
from omni_proxy.admin_api.access.roles import ALL
from omni_proxy.admin_api.responses import query_flag
from omni_proxy.admin_api.serializers.feed_snapshot import Snapshots
from omni_proxy.admin_api.services import DataPlaneView
from omni_proxy.admin_api.streamed_body import RETRY, Body, ReaderLimit

READERS = 32
PERIOD_SECS = 1.0


class _Events(Body):
    def __init__(
        self,
        readers: ReaderLimit,
        data_plane: DataPlaneView,
        snapshots: Snapshots,
        reader: Mapping[str, object],
    ) -> None:
        super().__init__(readers)
        self._reader = reader
        self._data_plane = data_plane
        self._snapshots = snapshots
        self._seen = 0  # the newest second that was sent to this reader
        self._due = 0.0

    async def __anext__(self) -> bytes:
        begins = not self._due
        if not begins:
            await trio.sleep_until(self._due)
            if self._data_plane.draining:
                raise StopAsyncIteration
        self._due = trio.current_time() + PERIOD_SECS
        snapshot, self._seen = self._snapshots.with_history(self._seen, self._reader)
        return b"%bdata: %b\n\n" % (RETRY if begins else b"", snapshot)


class FeedRoutes:
    def __init__(self, snapshots: Snapshots, data_plane: DataPlaneView, keys: KeyCheck) -> None:
        self._snapshots = snapshots
        self._data_plane = data_plane
        self._keys = keys
        self._readers = ReaderLimit(READERS, "too_many_readers")

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/feed", "feed", self.feed)

    async def feed(self) -> Response:
        holder = self._keys.holder()
        # Without a key the proxy requires none, so the reader may do everything.
        role = holder.role if holder is not None else ALL
        reader = {"reader": {"name": holder.name if holder is not None else None, "role": role}}
        if query_flag("once"):
            return Response(self._snapshots.now(reader), content_type="application/json")
        self._readers.check_limit()
        response = Response(b"", content_type="text/event-stream")
        response.headers.remove("Content-Length")
        response.headers["Cache-Control"] = "no-store"
        response.response = _Events(self._readers, self._data_plane, self._snapshots, reader)
        return response
