"""Several generations for one HTTP request, at the same time.

Invariant: the first failure ends them all, and leaving early aborts every one that has not ended.
They take turns, so that one request with many prompts does not fill the queue by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import trio

from omni_proxy.replica.api.common.errors import CLIENT_ERRORS, ClientError, DetailError
from omni_proxy.replica.api.common.sse import ChunkSource
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk, GenerateRequest

if TYPE_CHECKING:
    from omni_proxy.replica.pipeline.client import Client, Generation

# Chunks that wait while the caller reads slowly; more wait in the client.
MAX_BUFFERED_CHUNKS = 16
MAX_CONCURRENT = 16  # generations of one request that are submitted at the same time


def request_ids(request_id: str, count: int) -> list[str]:
    """One id for each of several requests; a single one has the id itself."""
    return [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]


async def complete_all(
    client: Client, requests: Sequence[GenerateRequest], ids: Sequence[str]
) -> list[CompletionResult]:
    """Their results in order. Raises the first failure as it is."""
    results: dict[str, CompletionResult] = {}
    failures: list[ClientError] = []
    turns = trio.Semaphore(MAX_CONCURRENT)

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


def merged_stream(
    client: Client, requests: Sequence[GenerateRequest], ids: Sequence[str]
) -> ChunkSource:
    """Their chunks as they come."""
    generations = [client.generate(*each) for each in zip(requests, ids, strict=True)]
    return generations[0] if len(generations) == 1 else MergedStream(generations)


class MergedStream:
    """Several generations as one: their chunks as they come, told apart by `request_id`.

    Entered and left by one task, as an async context manager around its iteration.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._running = trio.open_nursery()
        self._turns = trio.Semaphore(MAX_CONCURRENT)

    async def __aenter__(self) -> Self:
        nursery = await self._running.__aenter__()
        self._scope = nursery.cancel_scope
        channel: trio.MemorySendChannel[GenerateChunk | ClientError]
        channel, self._chunks = trio.open_memory_channel[GenerateChunk | ClientError](
            MAX_BUFFERED_CHUNKS
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


MAX_CHOICES = 128  # OpenAI's bound
USAGE_KEYS = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
SEED_RANGE = 2**64


def parse_choice_count(n: int | None) -> int:
    """How many answers a prompt shall have. Raises DetailError 400."""
    count = 1 if n is None else n
    if not 1 <= count <= MAX_CHOICES:
        raise DetailError(400, f"n must be within 1 and {MAX_CHOICES}, not {count}")
    return count


def requests_for_choices(request: GenerateRequest, count: int) -> list[GenerateRequest]:
    """The same request `count` times, each with a seed of its own where it has one."""
    seed = request.sampling.seed
    if seed is None or count == 1:
        return [request] * count
    return [
        replace(request, sampling=replace(request.sampling, seed=_wrapped(seed + index)))
        for index in range(count)
    ]


def _wrapped(seed: int) -> int:
    """A seed of 64 bits with its sign."""
    return (seed + SEED_RANGE // 2) % SEED_RANGE - SEED_RANGE // 2


def openai_usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """The OpenAI keys of a pipeline's usage; None is not known."""
    if usage is None:
        return None
    told = {key: usage[key] for key in USAGE_KEYS if usage.get(key) is not None}
    if "total_tokens" not in told and {"prompt_tokens", "completion_tokens"} <= told.keys():
        told["total_tokens"] = told["prompt_tokens"] + told["completion_tokens"]
    return told


def total_usage(usages: Sequence[dict[str, Any] | None], n: int = 1) -> dict[str, Any] | None:
    """The sum over several prompts of `n` answers each, in order; None where one is not known."""
    if any(usage is None for usage in usages):
        return None
    known = [openai_usage(usage) or {} for usage in usages]
    prompt = _sum(known[::n], "prompt_tokens")
    written = _sum(known, "completion_tokens")
    total: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }
    details = [each["prompt_tokens_details"] for each in known[::n] if each.get(USAGE_KEYS[-1])]
    if not details:
        return total
    return total | {"prompt_tokens_details": {"cached_tokens": _sum(details, "cached_tokens")}}


def _sum(counts: Iterable[dict[str, Any]], name: str) -> int:
    return sum(each.get(name) or 0 for each in counts)
