"""Rollouts of weights: begin, pause, resume, cancel, and their progress.

Invariant: GET waits for nothing and changes nothing. Readers of a rollout's events do not affect
it, and may disconnect at any time; their number is bounded, and none delays a shutdown. All routes
need the admin key.
"""

from __future__ import annotations

from typing import Final

import trio
from quart import Quart, Response, request

from omni_proxy.admin_api.access.key_check import caller
from omni_proxy.admin_api.forwarded_request import forwarded_headers
from omni_proxy.admin_api.responses import (
    RETRY,
    Body,
    ReaderLimit,
    json_object,
    json_response,
    query_flag,
)
from omni_proxy.admin_api.routes.operations.weight_routes import shown
from omni_proxy.admin_api.selector_resolution import SelectorResolver
from omni_proxy.admin_api.services import DataPlaneView
from omni_proxy.admin_ops.admin_route_table import ROLLOUT
from omni_proxy.upstream_http.credentials import credentials_of
from omni_proxy.weight_sync.rollout.progress import RolloutProgress
from omni_proxy.weight_sync.rollout.request import parse_rollout
from omni_proxy.weight_sync.rollout.service import RolloutCall
from omni_proxy.weight_sync.weight_operations import WeightOperations
from omni_proxy.wire.errors import to_json

READERS: Final = 32
POLL_SECS: Final = 1.0  # longest delay until a reader's stream ends at a shutdown
KEEP_ALIVE_SECS: Final = 15.0
APART_SECS: Final = 0.05  # simultaneous steps of many workers are one event
EVENTS: Final = "text/event-stream"


class _RolloutEvents(Body):
    """Events with the rollout's state: the first immediately, then one after each change until the
    rollout has ended."""

    def __init__(
        self, readers: ReaderLimit, data_plane: DataPlaneView, progress: RolloutProgress
    ) -> None:
        super().__init__(readers)
        self._data_plane, self._progress = data_plane, progress
        self._seen: int | None = None
        self._sent_at = 0.0
        self._ended = False

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        if self._seen is None:
            return RETRY + self._event()
        await trio.sleep(APART_SECS)
        while self._seen == self._progress.revision:
            with trio.move_on_after(POLL_SECS):
                await self._progress.changed.wait()
            if self._data_plane.draining:
                raise StopAsyncIteration
            if trio.current_time() - self._sent_at >= KEEP_ALIVE_SECS:
                self._sent_at = trio.current_time()
                return b": keep-alive\n\n"
        return self._event()

    def _event(self) -> bytes:
        self._seen, self._sent_at = self._progress.revision, trio.current_time()
        self._ended = self._progress.active is None
        return b"data: %b\n\n" % to_json(self._progress.shown())


class RolloutRoutes:
    def __init__(
        self,
        weight_operations: WeightOperations,
        data_plane: DataPlaneView,
        selectors: SelectorResolver,
    ) -> None:
        self._weight_operations = weight_operations
        self._data_plane = data_plane
        self._selectors = selectors
        self._readers = ReaderLimit(READERS, "too_many_readers")

    def mount(self, app: Quart) -> None:
        path = ROLLOUT.path
        app.add_url_rule(path, "weights_rollout", self.begin, methods=["POST"])
        app.add_url_rule(path, "weights_rollout_shown", self.show)
        app.add_url_rule(f"{path}/pause", "rollout_pause", self.pause, methods=["POST"])
        app.add_url_rule(f"{path}/resume", "rollout_resume", self.resume, methods=["POST"])
        app.add_url_rule(f"{path}/cancel", "rollout_cancel", self.cancel, methods=["POST"])

    async def begin(self) -> Response:
        """202 once the rollout is planned and recorded; the events and its location have its
        outcome."""
        wants_events = _wants_events()
        parsed = parse_rollout(await json_object())
        reply = await self._weight_operations.start_rollout(
            RolloutCall(
                parsed,
                await self._selectors.urls(request.args.get("selector")),
                caller(),
                credentials_of(forwarded_headers(request.headers)),
            )
        )
        if reply.ok and wants_events:
            return self._events()
        response = shown(reply)
        if reply.ok:
            response.headers["Location"] = ROLLOUT.path
        return response

    async def show(self) -> Response:
        """The current rollout, or the last one since the proxy started."""
        progress = self._weight_operations.rollouts.progress
        return self._events() if _wants_events() else json_response(progress.shown())

    async def pause(self) -> Response:
        return shown(await self._weight_operations.rollouts.pause())

    async def resume(self) -> Response:
        return shown(await self._weight_operations.rollouts.resume())

    async def cancel(self) -> Response:
        return shown(await self._weight_operations.rollouts.cancel(caller()))

    def _events(self) -> Response:
        self._readers.check_limit()
        progress = self._weight_operations.rollouts.progress
        response = Response(b"", content_type=EVENTS)
        response.headers.remove("Content-Length")
        response.headers["Cache-Control"] = "no-store"
        response.response = _RolloutEvents(self._readers, self._data_plane, progress)
        return response


def _wants_events() -> bool:
    return query_flag("follow") or EVENTS in request.headers.get("Accept", "")
