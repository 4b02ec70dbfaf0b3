"""A model of an inference engine: continuous batching, chunked prefill, a block cache with LRU.

A step computes at most `CHUNK_TOKENS` prompt tokens, in order of admission, and one token of each
decoding request. A request is admitted if the batch has a free slot, and its prompt and output fit
into the KV memory. Unused blocks stay cached until memory is needed; the least recently used are
evicted first. Invariants: `used + idle + free` tokens are `kv_tokens`; only computed leading blocks
are reused, and at least one token of each prompt is computed. Simplified: memory for the whole
output is reserved, so nothing is preempted. Pure: the time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import Final, Protocol

from omni_proxy.simulate.slot_cache import SlotCache
from omni_proxy.simulate.workload import Request
from omni_proxy.wire.load_report import LoadReport

CHUNK_TOKENS: Final = 2048


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Speed and memory of an engine. `kv_tokens` 0: unlimited. `slots` above 0: caches texts like
    llama.cpp, one per slot, and `kv_tokens` limits the texts stored in addition."""

    prefill_tokens_per_sec: float = 8000.0
    prefill_overhead_ms: float = 0.0  # per prompt, in addition to its tokens
    decode_step_ms: float = 6.0
    decode_step_ms_per_request: float = 0.35
    max_batch: int = 256
    kv_tokens: int = 524288
    slots: int = 0


class ResponseListener(Protocol):
    """The sender of a request, notified of the first token and of the end."""

    def on_first_token(self) -> None: ...

    def on_completed(self, cached_tokens: int) -> None:
        """`cached_tokens`: tokens of its prompt that were cached at admission."""

    def on_failed(self, error: str, *, refused: bool = False) -> None: ...


class CachePublisher(Protocol):
    """Receives changes of the block cache."""

    def stored(self, request: Request, place: int) -> None: ...
    def removed(self, block: int) -> None: ...
    def cleared(self) -> None: ...
    def publish(self) -> None:
        """A step has ended."""

    def die(self) -> None: ...


# schedule(at, callback, number): `number` is passed to the callback, to recognise outdated calls.
Schedule = Callable[[float, Callable[[int], None], int], None]


class Job:
    """One request at an engine."""

    __slots__ = (
        "cached_blocks",
        "cached_tokens",
        "listener",
        "pinned",
        "prefill",
        "private",
        "request",
    )

    def __init__(self, request: Request, listener: ResponseListener) -> None:
        self.request = request
        self.listener = listener
        self.cached_blocks = 0  # of its prompt, at admission
        self.cached_tokens = 0
        self.prefill = 0  # prompt tokens that are not computed yet
        self.private = 0  # KV tokens used only by this request
        self.pinned: tuple[int, ...] = ()  # blocks that the request uses


class _Block:
    __slots__ = ("tokens", "users")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.users = 1


class BlockCache:
    """The KV memory, in tokens: blocks of prompts by id, and private memory of requests."""

    def __init__(self, kv_tokens: int, publisher: CachePublisher | None = None) -> None:
        self._publisher = publisher
        self.free: float = kv_tokens or inf
        self._kv_tokens = kv_tokens
        self._blocks: dict[int, _Block] = {}
        self._idle: OrderedDict[int, _Block] = OrderedDict()  # unused blocks, in LRU order
        self._idle_tokens = 0

    @property
    def usage(self) -> float | None:
        """The share of memory that requests use; None if it is unlimited."""
        return 1 - (self.free + self._idle_tokens) / self._kv_tokens if self._kv_tokens else None

    def tokens_by_block(self) -> dict[int, int]:
        return {name: block.tokens for name, block in self._blocks.items()}

    def leading(self, blocks: tuple[int, ...]) -> int:
        """How many leading blocks are cached."""
        by_name = self._blocks
        count = 0
        for block in blocks:
            if block not in by_name:
                break
            count += 1
        return count

    def admit(self, job: Job) -> bool:
        """Reserve memory for the whole prompt and output; False if there is not enough."""
        request, by_name, idle = job.request, self._blocks, self._idle
        pinned = request.blocks[: self.leading(request.blocks)]
        pinned_blocks = list(map(by_name.__getitem__, pinned))
        cached = sum([block.tokens for block in pinned_blocks])
        if len(pinned) == len(request.blocks) and pinned:  # the cached last block may be longer
            last = pinned_blocks[-1].tokens
            cached -= max(0, last - request.block_size(len(pinned) - 1))
        needed = request.input_tokens + request.output_tokens - cached
        pinned_idle_tokens = sum([block.tokens for block in pinned_blocks if not block.users])
        if needed > self.free + self._idle_tokens - pinned_idle_tokens:
            return False
        for name, block in zip(pinned, pinned_blocks, strict=True):
            if not block.users:
                del idle[name]
                self._idle_tokens -= block.tokens
            block.users += 1
        while self.free < needed:
            self._evict_one()
        self.free -= needed
        job.private = needed
        job.pinned = pinned
        job.cached_blocks = len(pinned)
        job.cached_tokens = min(cached, request.input_tokens - 1)
        job.prefill = request.input_tokens - job.cached_tokens
        return True

    def publish(self, job: Job) -> None:
        """The job's prompt is computed: all of its blocks can be reused."""
        request = job.request
        for place in range(len(job.pinned), len(request.blocks)):
            name = request.blocks[place]
            tokens = request.block_size(place)
            block = self._blocks.get(name)
            job.private -= tokens
            if block is None:
                self._blocks[name] = _Block(tokens)
                if self._publisher is not None:
                    self._publisher.stored(request, place)
                continue
            self.free += tokens  # another request has computed the same block
            block.users += 1
            if self._idle.pop(name, None) is not None:
                self._idle_tokens -= block.tokens
        job.pinned = request.blocks

    def release(self, job: Job) -> None:
        self.free += job.private
        job.private = 0
        for name in reversed(job.pinned):
            block = self._blocks[name]
            block.users -= 1
            if not block.users:
                self._idle[name] = block
                self._idle_tokens += block.tokens
        job.pinned = ()

    def clear(self) -> None:
        """Remove all unused blocks."""
        if self._publisher is not None and len(self._idle) == len(self._blocks):
            self._publisher.cleared()
        while self._idle:
            self._evict_one()

    def _evict_one(self) -> None:
        name, block = self._idle.popitem(last=False)
        del self._blocks[name]
        if self._publisher is not None:
            self._publisher.removed(name)
        self._idle_tokens -= block.tokens
        self.free += block.tokens


class Engine:
    """One worker's engine. Of `seen_blocks` prompt blocks, `found_blocks` were cached at admission.
    `publisher`: of its KV events; not used with `slots`."""

    def __init__(
        self,
        spec: EngineSpec,
        schedule: Schedule,
        *,
        started_at: float = 0.0,
        publisher: CachePublisher | None = None,
    ) -> None:
        self.spec = spec
        self.alive = True
        self.factor = 1.0  # multiplier of the duration of steps
        self.found_blocks = 0
        self.seen_blocks = 0
        self.requests = 0  # that were sent to the engine
        self._schedule = schedule
        self._publisher = publisher
        self._cache = _cache_of(spec, publisher)
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  # heap by the step of the last token
        self._step = 0
        self._admitted = 0
        self._begun = 0  # prompts that start in the next step
        # The current run of equal steps: count, id, start, and seconds per step.
        self._running = 0
        self._number = 0
        self._began_at = started_at
        self._step_secs = 0.0
        self._chunk = 0

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def load(self) -> LoadReport:
        """The load that the engine would report now. As in vLLM and SGLang, requests that the
        present step has no room for also count as waiting."""
        waiting, remaining = len(self._waiting), self._chunk
        for job in self._prefilling:
            waiting += remaining <= 0
            remaining -= job.prefill
        return LoadReport(float(waiting), self._cache.usage)

    @property
    def cached_blocks(self) -> dict[int, int]:
        """The tokens of each block in the block cache; none with `slots`."""
        cache = self._cache
        return cache.tokens_by_block() if isinstance(cache, BlockCache) else {}

    def submit(self, request: Request, listener: ResponseListener, now: float) -> None:
        """Start a request; the listener is called at the first token and at the end."""
        self.requests += 1
        if (
            self.spec.kv_tokens
            and request.input_tokens + request.output_tokens > self.spec.kv_tokens
        ):
            listener.on_failed("the request is longer than the KV memory", refused=True)
            return
        self._waiting.append(Job(request, listener))
        if not self._running:
            self._begin(now)
        elif not self._chunk and len(self._waiting) == 1 and self._has_place():
            self._shorten(now)

    def die(self) -> None:
        """The engine's process ends: every request fails, and no new one is accepted."""
        self.alive = False
        self._number += 1
        self._running = 0
        jobs = [
            *(job for _, _, job in sorted(self._decoding, key=_order)),
            *self._prefilling,
            *self._waiting,
        ]
        self._decoding.clear()
        self._prefilling.clear()
        self._waiting.clear()
        self._begun = 0
        self._cache = _cache_of(self.spec, None)
        if self._publisher is not None:
            self._publisher.die()
        for job in jobs:
            job.listener.on_failed("the worker died")

    def cancel(self, listener: ResponseListener) -> None:
        """Drop the request of this listener: its connection was closed."""
        for queue in (self._waiting, self._prefilling):
            for job in queue:
                if job.listener is listener:
                    queue.remove(job)
                    self._cache.release(job)
                    return
        for entry in self._decoding:
            if entry[2].listener is listener:
                self._decoding.remove(entry)
                heapify(self._decoding)
                self._cache.release(entry[2])
                return

    def evict(self) -> None:
        """Drop all cached blocks that no request uses."""
        self._cache.clear()
        self._publish()

    def _publish(self) -> None:
        if self._publisher is not None:
            self._publisher.publish()

    def _has_place(self) -> bool:
        return len(self._prefilling) + len(self._decoding) < self.spec.max_batch

    def _shorten(self, now: float) -> None:
        """End the run of steps after the present step, so that a request can be admitted."""
        done = max(1, ceil((now - self._began_at) / self._step_secs - 1e-9))
        if done < self._running:
            self._run(done)

    def _begin(self, now: float) -> None:
        self._admit()
        self._publish()
        spec, decoding = self.spec, len(self._decoding)
        self._began_at = now
        self._chunk = min(CHUNK_TOKENS, sum(job.prefill for job in self._prefilling))
        if not self._chunk and not decoding:
            self._running = 0
            return
        secs = self._chunk / spec.prefill_tokens_per_sec
        secs += self._begun * spec.prefill_overhead_ms / 1000
        self._begun = 0
        if decoding:
            secs += (spec.decode_step_ms + spec.decode_step_ms_per_request * decoding) / 1000
        self._step_secs = secs * self.factor
        self._run(1 if self._chunk else self._decoding[0][0] - self._step)

    def _run(self, steps: int) -> None:
        self._running = steps
        self._number += 1
        self._schedule(self._began_at + steps * self._step_secs, self._on_steps_end, self._number)

    def _admit(self) -> None:
        while self._waiting and self._has_place():
            job = self._waiting[0]
            if not self._cache.admit(job):
                return
            self._waiting.popleft()
            self._prefilling.append(job)
            self._begun += 1
            self.found_blocks += job.cached_blocks
            self.seen_blocks += job.request.block_count

    def _on_steps_end(self, number: int) -> None:
        if number != self._number:
            return
        now = self._began_at + self._running * self._step_secs
        self._step += self._running
        remaining = self._chunk
        while remaining and self._prefilling:
            job = self._prefilling[0]
            computed = min(remaining, job.prefill)
            job.prefill -= computed
            remaining -= computed
            if not job.prefill:
                self._prefilling.popleft()
                self._cache.publish(job)
                self._admitted += 1
                last = self._step + job.request.output_tokens - 1
                heappush(self._decoding, (last, self._admitted, job))
                job.listener.on_first_token()
        while self._decoding and self._decoding[0][0] <= self._step:
            job = heappop(self._decoding)[2]
            self._cache.release(job)
            job.listener.on_completed(job.cached_tokens)
        self._begin(now)


def _cache_of(spec: EngineSpec, publisher: CachePublisher | None) -> BlockCache | SlotCache:
    if spec.slots:
        return SlotCache(spec.slots, spec.kv_tokens)
    return BlockCache(spec.kv_tokens, publisher)


def _order(entry: tuple[int, int, Job]) -> int:
    return entry[1]
