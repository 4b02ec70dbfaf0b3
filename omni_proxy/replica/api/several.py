"""Several generations for one HTTP request, at the same time.

Invariant: the first failure ends them all, and leaving early aborts every one that has not ended.
They take turns, so that one request with many prompts does not fill the queue by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import trio

from omni_proxy.replica.api.errors import CLIENT_ERRORS, ClientError
from omni_proxy.replica.api.sse import Source
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk, GenerateRequest

if TYPE_CHECKING:
    from omni_proxy.replica.pipeline.client import Client, Generation

# Chunks that wait while the caller reads slowly; more wait in the client.
WAITING_CHUNKS = 16
AT_ONCE = 16  # generations of one request that are submitted at the same time


def ids_of(request_id: str, count: int) -> list[str]:
    """One id for each of several requests; a single one has the id itself."""
    return [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]


async def complete_all(
    client: Client, requests: Sequence[GenerateRequest], ids: Sequence[str]
) -> list[CompletionResult]:
    """Their results in order. Raises the first failure as it is."""
    results: dict[str, CompletionResult] = {}
    failures: list[ClientError] = []
    turns = trio.Semaphore(AT_ONCE)

    async def complete(request: GenerateRequest, request_id: str) -> None:
        try:
            async with turns:
                results[request_id] = await client.completion(request, request_id)
        except CLIENT_ERRORS as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for request, request_id in zip(requests, ids, strict=True):
            nursery.start_soon(complete, request, request_id)
    if failures:
        raise failures[0]
    return [results[request_id] for request_id in ids]


def source_of(client: Client, requests: Sequence[GenerateRequest], ids: Sequence[str]) -> Source:
    """Their chunks as they come."""
    generations = [client.generate(*each) for each in zip(requests, ids, strict=True)]
    return generations[0] if len(generations) == 1 else Braid(generations)


class Braid:
    """Several generations as one: their chunks as they come, told apart by `request_id`.

    Entered and left by one task, as an async context manager around its iteration.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._running = trio.open_nursery()
        self._turns = trio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> Self:
        nursery = await self._running.__aenter__()
        self._scope = nursery.cancel_scope
        channel: trio.MemorySendChannel[GenerateChunk | ClientError]
        channel, self._chunks = trio.open_memory_channel[GenerateChunk | ClientError](
            WAITING_CHUNKS
        )
        with channel:
            for generation in self._generations:
                nursery.start_soon(self._pump, generation, channel.clone())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scope.cancel()
        self._chunks.close()
        await self._running.__aexit__(kind, error, trace)

    async def __anext__(self) -> GenerateChunk:
        """Raises what the first generation to fail raised."""
        try:
            chunk = await self._chunks.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        if isinstance(chunk, GenerateChunk):
            return chunk
        raise chunk

    async def _pump(
        self, generation: Generation, out: trio.MemorySendChannel[GenerateChunk | ClientError]
    ) -> None:
        with out:
            try:
                async with self._turns, generation:
                    async for chunk in generation:
                        await out.send(chunk)
            except CLIENT_ERRORS as error:
                await out.send(error)
