"""The queue from the coordinator to one reader: chunks in order, then exactly one end.

Invariant: the bytes that wait for readers are bounded, per reader and in total; above a bound a
stream ends with an error. Every method but `take` is synchronous.
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
    """Part of a stage's output, or its complete result while other stages still work."""

    stage: str
    chunk: dict[str, Any]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class DeliveryEnd:
    """The complete results of the terminal stages; nothing follows."""

    results: dict[str, dict[str, Any]]


class Delivery:
    """One reader's queue; `take` is called by one task at a time."""

    def __init__(self, request_id: str, backlog: DeliveryBacklog) -> None:
        self.request_id = request_id
        self.waiting_bytes = 0
        self.last_taken_at = trio.current_time()
        self.end: DeliveryEnd | RequestFailed | None = None
        self._backlog = backlog
        self._chunks: deque[DeliveredChunk] = deque()
        self._arrived = trio.Event()

    def put(self, chunk: DeliveredChunk) -> None:
        if self.end is None:
            if not self._chunks:
                self.last_taken_at = trio.current_time()  # there was nothing to take before
            size = size_bytes(chunk.chunk)
            self._chunks.append(chunk)
            self.waiting_bytes += size
            self._backlog.on_put(self, size)
            self._arrived.set()

    def finish(self, end: DeliveryEnd | RequestFailed) -> None:
        """The first end counts; chunks before it can still be taken."""
        if self.end is None:
            self.end = end
            self._arrived.set()

    def drop(self) -> None:
        """Discard what waits: the reader is gone."""
        self._chunks.clear()
        self._backlog.on_taken(self.waiting_bytes)
        self.waiting_bytes = 0

    async def take(self) -> DeliveredChunk | DeliveryEnd:
        """Return the next chunk or the end; raises RequestFailed if that is the end."""
        while True:
            await trio.lowlevel.checkpoint()
            if self._chunks:
                chunk = self._chunks.popleft()
                size = size_bytes(chunk.chunk)
                self.waiting_bytes -= size
                self._backlog.on_taken(size)
                self.last_taken_at = trio.current_time()
                return chunk
            if isinstance(self.end, RequestFailed):
                raise self.end
            if self.end is not None:
                return self.end
            self._arrived = trio.Event()
            await self._arrived.wait()


class DeliveryBacklog:
    """All open deliveries; `cut(request_id, error)` ends the request of a reader that is too
    slow."""

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

    def on_put(self, delivery: Delivery, size: int) -> None:
        self._waiting_bytes += size
        if delivery.waiting_bytes > self._reader_bytes:
            self._fail(delivery)
        elif self._waiting_bytes > self._total_bytes:
            waiting = [reader for reader in self._open.values() if reader.waiting_bytes]
            self._fail(min(waiting, key=lambda reader: reader.last_taken_at))

    def on_taken(self, size: int) -> None:
        self._waiting_bytes -= size

    def counters(self) -> dict[str, float]:
        """The `stream_delivery` of GET /health (api-server.md 1.1)."""
        now = trio.current_time()
        idle_secs = [
            now - reader.last_taken_at for reader in self._open.values() if reader.waiting_bytes
        ]
        return {
            "stream_backlog_bytes": self._waiting_bytes,
            "open_stream_count": len(self._open),
            "generation_finished_stream_count": sum(
                reader.end is not None for reader in self._open.values()
            ),
            "longest_reader_idle_s": round(max(idle_secs, default=0.0), 3),
            "failed_stream_count": self._failed,
        }

    def _fail(self, delivery: Delivery) -> None:
        self._failed += 1
        waiting_bytes = delivery.waiting_bytes
        delivery.drop()
        message = f"the reader is too slow: {waiting_bytes} bytes waited for it"
        self._cut(delivery.request_id, RequestFailed(message, 503))
