"""The cache_aware policy with engines' KV events: prompts of token ids are matched exactly.

    prompt of token ids, and workers whose events are exact -> by the blocks that they have
    text of which an engine has tokenized a prefix          -> by its blocks, if a worker has any
    anything else                                           -> by the tree, as `cache_aware`

Exact workers are compared with the inferred state of workers without events: the larger share of
the prompt wins. If all are exact and none has enough, the shortest queue. Invariants: with
`source = "inferred"` every choice is that of `cache_aware`; an exact worker counts as having only
blocks that it reported, or that were sent to it a moment ago; a preview changes no state.
Source: note:features 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.prompt_tokens import (
    join_token_ids,
    template_mark,
    token_id_list,
    tokenize_body,
)
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.kv_events.block_keys import PromptBlocks
from omni_proxy.routing.kv_events.tokenized_texts import MIN_BYTES, TokenizeRequest
from omni_proxy.routing.policies.cache_aware import CacheAware, CacheChoice, prompt_text
from omni_proxy.routing.policies.cache_feedback import PromptText
from omni_proxy.routing.token_id_text import TokenIdText
from omni_proxy.routing.tree_key import MAX_BLOCK, tree_key

RECENT: Final = 64  # prompts


class _Group(NamedTuple):
    """Exact workers with the same block size, in tokens; 0: these workers have no blocks yet."""

    block_size: int
    mask: int


class _GroupedWorkers(NamedTuple):
    """The candidates: exact ones in `by_url`, the others in `rest`; `sizes`: their block sizes."""

    candidates: Sequence[Worker]
    generation: int
    groups: tuple[_Group, ...]
    by_url: dict[str, Worker]
    rest: tuple[Worker, ...]
    sizes: frozenset[int]


class _Match(NamedTuple):
    """The best match. `length` and `matched` are in tokens, or in bytes if `inferred`."""

    length: int
    matched: int
    holders: tuple[Worker, ...]
    block_size: int = 0
    inferred: bool = False


class _Recent(NamedTuple):
    """Cached parts of a `_Prompt`."""

    tokens: int
    blocks: dict[int, PromptBlocks]


class _Prompt(NamedTuple):
    """`blocks`: by block size; of a text only those of its tokenized prefix."""

    tokens: int
    blocks: dict[int, PromptBlocks]
    workers: _GroupedWorkers
    is_text: bool = False


_NO_WORKERS = _GroupedWorkers((), -1, (), {}, (), frozenset())


class EventAware(CacheAware):
    """Without `use_blocks` it behaves like `CacheAware`."""

    __slots__ = ("_blocks", "_by_events", "_grouped", "_recent", "_tokenizes")

    def __init__(self, routing: RoutingConfig, now: float) -> None:
        super().__init__(routing, now)
        self._blocks: BlockIndex | None = None
        self._by_events = routing.cache_aware.source == "events"
        self._tokenizes = routing.cache_aware.tokenize == "engine"
        self._grouped = _NO_WORKERS
        self._recent: dict[bytes, _Recent] = {}  # by a digest of the spelling

    def use_blocks(self, blocks: BlockIndex) -> None:
        self._blocks, self._grouped = blocks, _NO_WORKERS

    def reconfigure(self, routing: RoutingConfig) -> bool:
        self._by_events = routing.cache_aware.source == "events"
        self._tokenizes = routing.cache_aware.tokenize == "engine"
        return super().reconfigure(routing)

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        prompt = self._prompt(candidates, requirements)
        if prompt is None or self._blocks is None:
            worker = super().pick(candidates, requirements)
            if self._tokenizes:
                self._request_tokens(worker, candidates, requirements)
            return worker
        choice, match = self._choose_by_events(candidates, requirements, prompt)
        if prompt.is_text:
            self._blocks.texts.record_use()
            self._request_tokens(choice.worker, candidates, requirements)
        self._count_choice(choice, candidates, match.length)
        cached_tokens = (
            match.matched if choice.worker in match.holders and not match.inferred else -1
        )
        self._record_sent(choice.worker, requirements, prompt, cached_tokens)
        return choice.worker

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        prompt = self._prompt(candidates, requirements)
        if prompt is None:
            return super().preview_pick(candidates, requirements)
        imbalance = self._imbalance
        choice, match = self._choose_by_events(candidates, requirements, prompt)
        self._imbalance = imbalance
        return choice.worker, self._words_of(choice, match)

    def explain_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> dict[str, object]:
        facts = super().explain_pick(candidates, requirements)
        prompt = self._prompt(candidates, requirements)
        if prompt is None:
            return facts
        cached = self._cached_tokens(prompt)
        matched = {url: cached.get(worker, 0) for url, worker in prompt.workers.by_url.items()}
        return {**facts, "prompt_tokens": prompt.tokens, "matched_tokens": matched}

    def cached_prefix(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[bytes, dict[Worker, int]]:
        text, cached = super().cached_prefix(candidates, requirements)
        prompt = self._prompt(candidates, requirements)
        if prompt is None or not text:
            return text, cached
        exact = prompt.workers.by_url.values()
        lengths = {worker: size for worker, size in cached.items() if worker not in set(exact)}
        for worker, tokens in self._cached_tokens(prompt).items():
            lengths[worker] = (len(text) - 1) * tokens // prompt.tokens
        return text, lengths

    def record_pick(self, worker: Worker, requirements: Requirements) -> None:
        prompt = self._prompt((worker,), requirements)
        if prompt is None:
            super().record_pick(worker, requirements)
        else:
            self._record_sent(worker, requirements, prompt)

    @property
    def remembered_prompts(self) -> int:
        """How many prompts' blocks are kept for their repetition."""
        return len(self._recent)

    def maintain(self, now: float) -> None:
        super().maintain(now)
        if self._blocks is not None:
            self._blocks.maintain(now)

    def stats(self) -> dict[str, object]:
        stats, blocks = super().stats(), self._blocks
        if blocks is None or not self._by_events:
            return stats
        tokenize = {"tokenize": blocks.texts.to_dict()} if self._tokenizes else {}
        return {
            **stats,
            "index_blocks": blocks.blocks,
            "index_bytes": blocks.memory_bytes,
            **tokenize,
        }

    def _prompt(self, candidates: Sequence[Worker], requirements: Requirements) -> _Prompt | None:
        """None if the request can be matched only by the tree."""
        blocks = self._blocks
        if not self._by_events or blocks is None or not blocks.has_exact:
            return None
        workers = self._grouped
        if workers.candidates is not candidates or workers.generation != blocks.generation:
            workers = self._grouped = _group_workers(candidates, blocks)
        if not workers.groups:
            return None
        model = requirements.model
        if model is not None and any(model in worker.adapters for worker in candidates):
            return None
        raw = token_id_list(requirements)
        if raw is None:
            return self._text_prompt(candidates, requirements, workers) if self._tokenizes else None
        tokens, blocks_by_size = self._blocks_of(raw, workers.sizes)
        return _Prompt(tokens, blocks_by_size, workers) if tokens else None

    def _text_prompt(
        self, candidates: Sequence[Worker], requirements: Requirements, workers: _GroupedWorkers
    ) -> _Prompt | None:
        """None if the tree matches more of the text than an engine has tokenized, or no worker has
        its first block: matching by blocks must not be worse than by the tree."""
        blocks, text = self._blocks, prompt_text(candidates, requirements)
        assert blocks is not None
        tokenized = blocks.texts.find(_marked(text, requirements), text.length)
        if tokenized is None or self._inferred(text, candidates) > tokenized.shared + MAX_BLOCK:
            return None
        by_size = {size: tokenized.known.blocks(size, tokenized.tokens) for size in workers.sizes}
        if not any(
            blocks.match(by_size[group.block_size], group.mask, self._now)[0]
            for group in workers.groups
            if group.block_size
        ):
            return None
        whole = text.length * tokenized.known.tokens // tokenized.known.length
        return _Prompt(max(1, whole, tokenized.tokens), by_size, workers, is_text=True)

    def _request_tokens(
        self, worker: Worker, candidates: Sequence[Worker], requirements: Requirements
    ) -> None:
        """Request the tokens of this text from the worker's engine, if it is worth it."""
        blocks = self._blocks
        if blocks is None or not self._by_events or not blocks.is_exact(worker.url):
            return
        text = prompt_text(candidates, requirements)
        if text.length < MIN_BYTES:
            return
        key = _marked(text, requirements)
        tokenized = blocks.texts.find(key, text.length)
        if not blocks.texts.should_tokenize(worker.worker.url, text.length, tokenized, self._now):
            return
        body = tokenize_body(requirements)
        if body is not None:
            blocks.texts.enqueue(TokenizeRequest(worker.worker.url, key, text.length, body))

    def _blocks_of(
        self, raw: msgspec.Raw, sizes: AbstractSet[int]
    ) -> tuple[int, dict[int, PromptBlocks]]:
        """The number of tokens of the prompt, 0 if there are none, and its blocks by size.

        Results of recent prompts are cached, because samples of the same prompt follow each other.
        """
        digest = xxh3_128_digest(raw)
        recent = self._recent.get(digest)
        if recent is not None and recent.blocks.keys() >= sizes:
            return recent.tokens, recent.blocks
        ids = TokenIdText(*join_token_ids(raw))
        blocks = {size: PromptBlocks(ids, size) for size in sizes}
        if len(self._recent) >= RECENT:
            del self._recent[next(iter(self._recent))]
        self._recent[digest] = _Recent(ids.tokens, blocks)
        return ids.tokens, blocks

    def _choose_by_events(
        self, candidates: Sequence[Worker], requirements: Requirements, prompt: _Prompt
    ) -> tuple[CacheChoice, _Match]:
        rules, match = self._rules, _Match(prompt.tokens, 0, ())
        if rules.spill == "global" and self._imbalanced(candidates):
            return self._shortest_queue(candidates, "imbalanced"), match
        match = self._best_match(prompt, requirements)
        if match.matched > rules.cache_threshold * match.length:
            choice = self._among_holders(match.matched, match.holders)
            if rules.spill == "chosen" and self._spills(choice.worker, candidates):
                choice = self._shortest_queue(candidates, "spilled", choice)
            return choice, match
        if not prompt.workers.rest:  # all workers are exact: sizes in the tree mean nothing
            choice = self._shortest_queue(candidates, "least_loaded")
            return choice._replace(matched=match.matched), match
        return self._without_match(candidates, match.length, match.matched), match

    def _best_match(self, prompt: _Prompt, requirements: Requirements) -> _Match:
        """The largest share of the prompt that a worker has."""
        blocks, workers = self._blocks, prompt.workers
        assert blocks is not None
        best = _Match(prompt.tokens, 0, ())
        for block_size, mask in workers.groups:
            if not block_size:
                continue
            depth, holder_mask = blocks.match(prompt.blocks[block_size], mask, self._now)
            if depth * block_size > best.matched:
                holders = tuple(workers.by_url[url] for url in blocks.holders_of(holder_mask))
                best = _Match(prompt.tokens, depth * block_size, holders, block_size)
        if not workers.rest:
            return best
        text, cached = super().cached_prefix(workers.rest, requirements)
        sizes = [cached.get(worker, 0) for worker in workers.rest]
        longest, length = max(sizes), len(text) - 1
        if longest * best.length <= best.matched * length:
            return best
        holders = tuple(w for w, size in zip(workers.rest, sizes, strict=True) if size == longest)
        return _Match(length, longest, holders, inferred=True)

    def _cached_tokens(self, prompt: _Prompt) -> dict[Worker, int]:
        """Cached tokens by exact worker, for those that have any."""
        blocks, workers = self._blocks, prompt.workers
        assert blocks is not None
        return {
            workers.by_url[url]: depth * group.block_size
            for group in workers.groups
            if group.block_size
            for url, depth in blocks.depths(
                prompt.blocks[group.block_size], group.mask, self._now
            ).items()
        }

    def _record_sent(
        self, worker: Worker, requirements: Requirements, prompt: _Prompt, cached_tokens: int = -1
    ) -> None:
        """The prompt is sent to the worker, which will soon have its blocks. `cached_tokens`: those
        that it has now; -1 if they were not counted."""
        blocks, workers = self._blocks, prompt.workers
        if blocks is None:
            return
        prompt_blocks = prompt.blocks.get(blocks.block_size(worker.url))
        if prompt_blocks is None:
            cached_tokens = 0
        else:
            if cached_tokens < 0:
                bit = blocks.bit_of(worker.url)
                cached_tokens = prompt_blocks.size * blocks.match(prompt_blocks, bit, self._now)[0]
            if cached_tokens < prompt_blocks.size * prompt_blocks.count:
                blocks.predict(worker.url, prompt_blocks, self._now)
        if workers.rest or prompt.is_text:
            super().record_pick(worker, requirements)
        if worker.url in workers.by_url and not prompt.is_text:
            self._feedback.expect(worker, requirements, prompt.tokens, cached_tokens)

    def _words_of(self, choice: CacheChoice, match: _Match) -> str:
        unit = "bytes match" if match.inferred else "tokens are cached"
        return self._words_for(choice, f"{choice.matched} of {match.length} {unit}")


def _marked(text: PromptText, requirements: Requirements) -> bytes:
    """Key of the text among known texts, with its template: other tools give other tokens."""
    mark = template_mark(requirements)
    return tree_key(mark + text.whole) if mark else text.key


def _group_workers(candidates: Sequence[Worker], blocks: BlockIndex) -> _GroupedWorkers:
    masks: dict[int, int] = {}
    by_url: dict[str, Worker] = {}
    rest: list[Worker] = []
    for worker in candidates:
        if not blocks.is_exact(worker.url):
            rest.append(worker)
            continue
        by_url[worker.url] = worker
        size = blocks.block_size(worker.url)
        masks[size] = masks.get(size, 0) | blocks.bit_of(worker.url)
    groups = tuple(_Group(size, mask) for size, mask in masks.items())
    sizes = frozenset(masks) - {0}
    return _GroupedWorkers(candidates, blocks.generation, groups, by_url, tuple(rest), sizes)
