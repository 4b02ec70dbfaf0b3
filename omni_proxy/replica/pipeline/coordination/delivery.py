"""The way from the coordinator to one reader: pieces in order, then exactly one end.

Invariant: what waits for readers is bounded, each reader's share and the sum of all; past the
bound a stream ends with an error instead of growing. Every method but `take` is an atom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from omni_proxy.replica.pipeline.coordination.chunks import size_bytes
from omni_proxy.replica.pipeline.requests import RequestFailed

READER_BYTES = 128 << 20
TOTAL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class DeliveredChunk:
    """Part of what `stage` makes for this request, or all of it while other stages still work."""

    stage: str
    chunk: dict[str, Any]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class DeliveryEnd:
    """The whole results of the terminal stages; nothing comes after it."""

    results: dict[str, dict[str, Any]]


class Delivery:
    """One reader's queue; `take` is called by one task at a time."""

    def __init__(self, request_id: str, backlog: DeliveryBacklog) -> None:
        self.request_id = request_id
        self.waiting_bytes = 0
        self.taken_at = trio.current_time()
        self.end: DeliveryEnd | RequestFailed | None = None
        self._backlog = backlog
        self._pieces: deque[DeliveredChunk] = deque()
        self._came = trio.Event()

    def put(self, piece: DeliveredChunk) -> None:
        if self.end is None:
            if not self._pieces:
                self.taken_at = trio.current_time()  # until now there was nothing to take
            size = size_bytes(piece.chunk)
            self._pieces.append(piece)
            self.waiting_bytes += size
            self._backlog.grew(self, size)
            self._came.set()

    def finish(self, end: DeliveryEnd | RequestFailed) -> None:
        """The first end counts; the pieces before it can still be taken."""
        if self.end is None:
            self.end = end
            self._came.set()

    def drop(self) -> None:
        """Forget what waits: nobody will take it."""
        self._pieces.clear()
        self._backlog.shrank(self.waiting_bytes)
        self.waiting_bytes = 0

    async def take(self) -> DeliveredChunk | DeliveryEnd:
        """The next piece or the end; raises RequestFailed where that is the end."""
        while True:
            await trio.lowlevel.checkpoint()
            if self._pieces:
                piece = self._pieces.popleft()
                size = size_bytes(piece.chunk)
                self.waiting_bytes -= size
                self._backlog.shrank(size)
                self.taken_at = trio.current_time()
                return piece
            if isinstance(self.end, RequestFailed):
                raise self.end
            if self.end is not None:
                return self.end
            self._came = trio.Event()
            await self._came.wait()


class DeliveryBacklog:
    """All open deliveries; `cut(request_id, error)` ends one whose reader is too slow."""

    def __init__(
        self,
        cut: Callable[[str, RequestFailed], None],
        *,
        reader_bytes: int = READER_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        self._cut = cut
        self._reader_bytes = reader_bytes
        self._total_bytes = total_bytes
        self._open: dict[str, Delivery] = {}
        self._waiting_bytes = 0
        self._failed = 0

    def open(self, request_id: str) -> Delivery:
        delivery = Delivery(request_id, self)
        self._open[request_id] = delivery
        return delivery

    def close(self, delivery: Delivery) -> None:
        delivery.drop()
        self._open.pop(delivery.request_id, None)

    def grew(self, delivery: Delivery, size: int) -> None:
        self._waiting_bytes += size
        if delivery.waiting_bytes > self._reader_bytes:
            self._fail(delivery)
        elif self._waiting_bytes > self._total_bytes:
            late = [each for each in self._open.values() if each.waiting_bytes]
            self._fail(min(late, key=lambda each: each.taken_at))

    def shrank(self, size: int) -> None:
        self._waiting_bytes -= size

    def counters(self) -> dict[str, float]:
        """The `stream_delivery` of GET /health (api-server.md 1.1)."""
        now = trio.current_time()
        late = [now - each.taken_at for each in self._open.values() if each.waiting_bytes]
        return {
            "stream_backlog_bytes": self._waiting_bytes,
            "open_stream_count": len(self._open),
            "generation_finished_stream_count": sum(
                each.end is not None for each in self._open.values()
            ),
            "longest_reader_idle_s": round(max(late, default=0.0), 3),
            "failed_stream_count": self._failed,
        }

    def _fail(self, delivery: Delivery) -> None:
        self._failed += 1
        held = delivery.waiting_bytes
        delivery.drop()
        message = f"the reader is too slow: {held} bytes waited for it"
        self._cut(delivery.request_id, RequestFailed(message, 503))
