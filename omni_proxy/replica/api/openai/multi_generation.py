"""Several generations for one HTTP request: concurrency, choices (`n`), ids and total usage.

Invariant: the first failure ends all generations, and closing early aborts those that have not
ended. At most MAX_CONCURRENT of one request run at a time, so that it does not fill the queue. The
first of `n` choices equals the response without `n`; the others differ only in their seed. The
usage counts a prompt once, regardless of its choices.
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

# Chunks buffered for a slow reader; more are buffered in the client.
MAX_BUFFERED_CHUNKS = 16
MAX_CONCURRENT = 16  # generations of one request that run at the same time


def request_ids(
    request_id: str, count: int, caller_ids: str | Sequence[str] | None = None
) -> list[str]:
    """One id for each of `count` requests, derived from `request_id`; a single request has it.

    If the caller `named` a list of ids, it must have one for each request. Raises DetailError 400.
    """
    if caller_ids is not None and not isinstance(caller_ids, str):
        if len(caller_ids) != count:
            raise DetailError(
                400, f"rid has {len(caller_ids)} elements, and there are {count} prompts"
            )
        return list(caller_ids)
    return [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]


async def complete_all(
    client: Client, requests: Sequence[GenerateRequest], ids: Sequence[str]
) -> list[CompletionResult]:
    """Return the results in order. Raises the first failure."""
    results: dict[str, CompletionResult] = {}
    failures: list[ClientError] = []
    slots = trio.Semaphore(MAX_CONCURRENT)

    async def complete(request: GenerateRequest, request_id: str) -> None:
        try:
            results[request_id] = await client.completion(request, request_id)
        except CLIENT_ERRORS as error:
            failures.append(error)
            nursery.cancel_scope.cancel()
        finally:
            slots.release()

    async with trio.open_nursery() as nursery:
        for request, request_id in zip(requests, ids, strict=True):
            # Start in order: a prefill leg waits for its decode leg. If the two replicas started
            # different prompts first, each would wait for the other.
            await slots.acquire()
            nursery.start_soon(complete, request, request_id)
    if failures:
        raise failures[0]
    return [results[request_id] for request_id in ids]


def merged_stream(
    client: Client, requests: Sequence[GenerateRequest], ids: Sequence[str]
) -> ChunkSource:
    """Return the chunks of all requests as they arrive."""
    generations = [client.generate(*arguments) for arguments in zip(requests, ids, strict=True)]
    return generations[0] if len(generations) == 1 else MergedStream(generations)


class MergedStream:
    """Several generations as one: their chunks as they arrive, each with its `request_id`.

    Entered and left by one task, as an async context manager around its iteration.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._nursery_manager = trio.open_nursery()
        self._slots = trio.Semaphore(MAX_CONCURRENT)

    async def __aenter__(self) -> Self:
        nursery = await self._nursery_manager.__aenter__()
        self._scope = nursery.cancel_scope
        channel: trio.MemorySendChannel[GenerateChunk | ClientError]
        channel, self._chunks = trio.open_memory_channel[GenerateChunk | ClientError](
            MAX_BUFFERED_CHUNKS
        )
        with channel:
            nursery.start_soon(self._forward_all, nursery, channel.clone())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scope.cancel()
        self._chunks.close()
        await self._nursery_manager.__aexit__(kind, error, trace)

    async def __anext__(self) -> GenerateChunk:
        """Raises the error of the first generation that fails."""
        try:
            chunk = await self._chunks.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        if isinstance(chunk, GenerateChunk):
            return chunk
        raise chunk

    async def _forward_all(
        self, nursery: trio.Nursery, out: trio.MemorySendChannel[GenerateChunk | ClientError]
    ) -> None:
        with out:
            for generation in self._generations:
                await self._slots.acquire()  # start in order: see complete_all
                nursery.start_soon(self._forward, generation, out.clone())

    async def _forward(
        self, generation: Generation, out: trio.MemorySendChannel[GenerateChunk | ClientError]
    ) -> None:
        with out:
            try:
                async with generation:
                    async for chunk in generation:
                        await out.send(chunk)
            except CLIENT_ERRORS as error:
                await out.send(error)
            finally:
                self._slots.release()


MAX_CHOICES = 128  # OpenAI's bound
USAGE_KEYS = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
SEED_RANGE = 2**64


def parse_choice_count(n: int | None) -> int:
    """The number of choices for each prompt. Raises DetailError 400."""
    count = 1 if n is None else n
    if not 1 <= count <= MAX_CHOICES:
        raise DetailError(400, f"n must be within 1 and {MAX_CHOICES}, not {count}")
    return count


def requests_for_choices(request: GenerateRequest, count: int) -> list[GenerateRequest]:
    """Return the request `count` times, each with a different seed if it has one."""
    seed = request.sampling.seed
    if seed is None or count == 1:
        return [request] * count
    return [
        replace(request, sampling=replace(request.sampling, seed=_wrap_seed(seed + index)))
        for index in range(count)
    ]


def _wrap_seed(seed: int) -> int:
    """Wrap to a signed seed of 64 bits."""
    return (seed + SEED_RANGE // 2) % SEED_RANGE - SEED_RANGE // 2


def openai_usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """The OpenAI keys of a pipeline's usage; None if unknown."""
    if usage is None:
        return None
    counts = {key: usage[key] for key in USAGE_KEYS if usage.get(key) is not None}
    if "total_tokens" not in counts and {"prompt_tokens", "completion_tokens"} <= counts.keys():
        counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
    return counts


def total_usage(usages: Sequence[dict[str, Any] | None], n: int = 1) -> dict[str, Any] | None:
    """The sum over several prompts of `n` choices each, in order; None if one is unknown."""
    if any(usage is None for usage in usages):
        return None
    usages_known = [openai_usage(usage) or {} for usage in usages]
    prompt = _sum(usages_known[::n], "prompt_tokens")
    completion = _sum(usages_known, "completion_tokens")
    total: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    details = [
        usage_known["prompt_tokens_details"]
        for usage_known in usages_known[::n]
        if usage_known.get(USAGE_KEYS[-1])
    ]
    if not details:
        return total
    return total | {"prompt_tokens_details": {"cached_tokens": _sum(details, "cached_tokens")}}


def _sum(counts: Iterable[dict[str, Any]], name: str) -> int:
    return sum(count.get(name) or 0 for count in counts)
