"""The KV memory of llama.cpp's server: each of a few slots has one text, more are in a store.

    a request ──> an idle slot with a common prefix, else the least recently used idle slot
                  └─ its old text is stored, if most of it would be lost
Invariant: a text is either in one slot or in the store. A request with a common prefix takes the
text over, and the part after the prefix is lost. Source: llama.cpp, tools/server (selection of a
slot, and its prompt cache). Simplified: the store is limited in tokens, not in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

from omni_proxy.simulate.workload import Request

# Shares of a prompt or of a text.
SIMILAR: Final = 0.1  # a slot with a smaller common prefix is not preferred
LOST: Final = 0.5  # if a slot would keep less of its text, the text is stored first
USABLE: Final = 0.25  # a stored text with a smaller common share is not used


class CachedPrompt(Protocol):
    """A request at an engine, with fields that are set at admission."""

    request: Request
    cached_blocks: int
    cached_tokens: int
    prefill: int


@dataclass(frozen=True, slots=True)
class _Text:
    """`tokens` includes the answer, which later prompts don't match."""

    blocks: tuple[int, ...] = ()
    tokens: int = 0


@dataclass(slots=True, eq=False)
class _Slot:
    text: _Text
    job: CachedPrompt | None = None
    used: int = 0  # sequence number of its last request


class SlotCache:
    """`stored_tokens`: limit of the store; 0: no limit."""

    def __init__(self, slots: int, stored_tokens: int) -> None:
        self._slots = [_Slot(_Text()) for _ in range(slots)]
        self._stored: list[_Text] = []  # the oldest first
        self._max_tokens = stored_tokens or inf
        self._requests = 0

    @property
    def usage(self) -> float:
        """The share of slots in use."""
        return sum(slot.job is not None for slot in self._slots) / len(self._slots)

    def admit(self, job: CachedPrompt) -> bool:
        """Assign a slot, with the reusable part of its text; False if all slots are in use."""
        idle = [slot for slot in self._slots if slot.job is None]
        if not idle:
            return False
        slot = self._choose(idle, job.request)
        cached_blocks = leading(slot.text.blocks, job.request.blocks)
        job.cached_blocks = cached_blocks
        cached = sum(job.request.block_size(place) for place in range(cached_blocks))
        job.cached_tokens = min(cached, job.request.input_tokens - 1)
        job.prefill = job.request.input_tokens - job.cached_tokens
        slot.job = job
        slot.text = _Text(job.request.blocks[:cached_blocks], cached)
        self._requests += 1
        slot.used = self._requests
        return True

    def publish(self, job: CachedPrompt) -> None:
        """The job's prompt is computed."""
        self._slot_of(job).text = _Text(job.request.blocks, job.request.input_tokens)

    def release(self, job: CachedPrompt) -> None:
        """Free the slot. It keeps prompt and answer; if the prompt was not computed, the reused
        part."""
        slot = self._slot_of(job)
        slot.job = None
        if slot.text.tokens == job.request.input_tokens:
            total = job.request.input_tokens + job.request.output_tokens
            slot.text = _Text(slot.text.blocks, total)

    def clear(self) -> None:
        """Drop all texts that no request uses."""
        self._stored.clear()
        for slot in self._slots:
            if slot.job is None:
                slot.text = _Text()

    def _slot_of(self, job: CachedPrompt) -> _Slot:
        return next(slot for slot in self._slots if slot.job is job)

    def _choose(self, idle: list[_Slot], request: Request) -> _Slot:
        def common(slot: _Slot) -> int:
            return common_tokens(slot.text, request)

        slot = max(idle, key=common)
        if common(slot) > SIMILAR * request.input_tokens:
            loses = common(slot) < LOST * slot.text.tokens
        else:
            slot = min(idle, key=lambda candidate: candidate.used)
            loses = True
        if loses and slot.text.tokens:
            self._store(slot.text)
            slot.text = self._take_better(slot.text, request)
        return slot

    def _store(self, text: _Text) -> None:
        """Store a text unless it is part of a stored one; stored prefixes of it are dropped."""
        if any(_begins(text, other) for other in self._stored):
            return
        self._stored = [other for other in self._stored if not _begins(other, text)]
        self._stored.append(text)
        while (
            len(self._stored) > 1
            and sum(stored.tokens for stored in self._stored) > self._max_tokens
        ):
            self._stored.pop(0)

    def _take_better(self, current: _Text, request: Request) -> _Text:
        """Remove and return the stored text that matches the request better than `current`, or
        return `current`."""
        best, most_tokens = _Text(), common_tokens(current, request)
        kept_share = most_tokens / current.tokens
        for text in self._stored:
            common = common_tokens(text, request)
            share = common / text.tokens
            if share >= USABLE and common > most_tokens and share > kept_share:
                best, most_tokens, kept_share = text, common, share
        if not best.tokens:
            return current
        self._stored.remove(best)
        return best


def leading(text: tuple[int, ...], blocks: tuple[int, ...]) -> int:
    """How many leading blocks are equal."""
    count = 0
    for block, wanted_block in zip(text, blocks, strict=False):
        if block != wanted_block:
            break
        count += 1
    return count


def common_tokens(text: _Text, request: Request) -> int:
    common_blocks = leading(text.blocks, request.blocks)
    return sum(request.block_size(place) for place in range(common_blocks))


def _begins(one: _Text, other: _Text) -> bool:
    """Whether the second text begins with the first."""
    return one.tokens <= other.tokens and other.blocks[: len(one.blocks)] == one.blocks
