"""The pipeline client, used by the HTTP layer: requests in, chunks out.

Invariant: a generation that is closed before its end aborts its request exactly once; one that
ended never does. No text, token or audio sample is returned twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self
from uuid import uuid4

import trio

from omni_proxy.replica.pipeline.coordination.coordinator import Coordinator
from omni_proxy.replica.pipeline.coordination.delivery import (
    ChunkAssembler,
    ChunkSplitter,
    Delivery,
    DeliveryEnd,
)
from omni_proxy.replica.pipeline.requests import (
    CompletionResult,
    GenerateChunk,
    GenerateRequest,
    PromptMessage,
    QueueFullError,
    RequestAborted,
    RequestFailed,
    SamplingParams,
    to_omni_request,
)
from omni_proxy.replica.pipeline.stage_messages import ProfilerStart

__all__ = [
    "Client",
    "CompletionResult",
    "GenerateChunk",
    "GenerateRequest",
    "Generation",
    "PromptMessage",
    "QueueFullError",
    "RequestAborted",
    "RequestFailed",
    "SamplingParams",
]


class Generation:
    """The chunks of one request, read with `async for`; `async with` allows stopping early.

    The request is submitted when the generation is entered or when its first chunk is requested,
    whichever is first; that raises QueueFullError or RequestFailed. The last chunk has `terminal`.
    """

    def __init__(self, coordinator: Coordinator, request: GenerateRequest, request_id: str) -> None:
        self.request_id = request_id
        self._coordinator = coordinator
        self._request = request
        self._splitter = ChunkSplitter(request_id)
        self._delivery: Delivery | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        # Check before opening: `__aexit__` is not called if `__aenter__` is cancelled.
        await trio.lowlevel.checkpoint_if_cancelled()
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerateChunk:
        if self._closed:
            raise StopAsyncIteration
        while not self._splitter.pending:
            await self._read(self._open())
        chunk = self._splitter.pending.popleft()
        if chunk.terminal:
            self._close()
        return chunk

    async def aclose(self) -> None:
        """Close the generation and abort the request unless it has ended; idempotent."""
        self._close()

    def __del__(self) -> None:
        # Closes a generation that was abandoned by `break`, without `async with`.
        self._close()

    def _open(self) -> Delivery:
        if self._closed:
            raise RequestFailed("this generation is closed", 500)
        if self._delivery is None:
            request = to_omni_request(self._request)
            self._delivery = self._coordinator.open(self.request_id, request)
        return self._delivery

    async def _read(self, delivery: Delivery) -> None:
        try:
            item = await delivery.take()
        except RequestFailed:
            self._close()
            raise
        if isinstance(item, DeliveryEnd):
            self._splitter.end(item.results)
        else:
            self._splitter.add_part(item.stage, item.chunk, whole=item.whole)

    def _close(self) -> None:
        self._closed = True
        if self._delivery is not None:
            self._coordinator.release(self._delivery)
            self._delivery = None


class Client:
    """All operations of a running pipeline for its callers; one per coordinator is enough."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def generate(self, request: GenerateRequest, request_id: str | None = None) -> Generation:
        return Generation(self._coordinator, request, request_id or str(uuid4()))

    async def completion(
        self, request: GenerateRequest, request_id: str | None = None
    ) -> CompletionResult:
        """Return the complete response; cancellation aborts the request."""
        async with self.generate(request, request_id) as generation:
            assembly = ChunkAssembler(generation.request_id)
            async for chunk in generation:
                assembly.add(chunk)
            return assembly.result()

    async def speech(
        self, request: GenerateRequest, request_id: str | None = None
    ) -> CompletionResult:
        """Return the complete response; raises RequestFailed 500 if it has no audio."""
        result = await self.completion(request, request_id)
        if result.audio is None:
            raise RequestFailed("no audio was generated", 500)
        return result

    async def abort(self, request_id: str) -> bool:
        """Abort a request, which any task may be reading; False if no such request is live."""
        await trio.lowlevel.checkpoint()
        return self._coordinator.abort(request_id)

    def end_early(self, wanted: Callable[[str], bool]) -> list[str]:
        """End the live requests whose id is `wanted`, with their partial output; return ids.

        Their readers get a result with `finish_reason` abort, or RequestAborted if no stage of the
        request generates text.
        """
        return self._coordinator.end_early(wanted)

    def health(self) -> dict[str, Any]:
        """The body of GET /health (note:api-server 1.1)."""
        return self._coordinator.health()

    def stats(self) -> dict[str, dict[str, float]]:
        """The latest gauges of each stage."""
        return self._coordinator.stats()

    def stage_info(self) -> dict[str, dict[str, Any]]:
        """The static information of each ready stage."""
        return self._coordinator.stage_info()

    def tp_size(self) -> int:
        """Number of processes that share a stage's model."""
        return max((info.get("tp_size", 1) for info in self.stage_info().values()), default=1)

    async def admin(
        self,
        action: str,
        payload: dict[str, Any] | None = None,
        stages: list[str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Run one operation on the stages; returns the aggregate of note:api-server 2.2.

        Raises RequestFailed: 400 for an unknown stage, 503 when stopped, 504 on timeout.
        """
        return await self._coordinator.admin(action, payload or {}, stages, timeout_s)

    @property
    def profiling_run_id(self) -> str | None:
        return self._coordinator.profiling_run_id

    def profiler_start(self, start: ProfilerStart) -> None:
        """Start recording at every stage; stages do not reply (note:api-server 4)."""
        self._coordinator.profiler_start(start)

    def profiler_stop(self, run_id: str | None = None) -> str | None:
        """Stop recording at every stage; returns the given id, else the active one."""
        return self._coordinator.profiler_stop(run_id)
