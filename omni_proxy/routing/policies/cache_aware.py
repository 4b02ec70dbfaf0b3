"""Cache-aware routing: a request goes to a worker that was sent the same prefix before.

    loads differ too much -> shortest queue                 (spill = "global")
    match > threshold     -> a holder of the longest match  (shortest queue: spill = "chosen")
    else                  -> smallest tree, or least loaded (fallback)

`policy = "cache_aware"` runs the subclass `event_aware.EventAware`. The chosen worker counts as
holder of the text until its response reports less (`feedback`). Invariants: equal workers are
picked in turn; previews change no state; one tree, bounded in total, keyed by the models that
workers name; prefixes of requests in flight are not evicted by feedback. Source: note:routers 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from heapq import nsmallest
from typing import NamedTuple

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cluster_hints import ClusterHints
from omni_proxy.routing.inspect.prefix_text import prefix_text
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.cache_cost import EXACT, PromptCost, cheapest, count_prompt_tokens
from omni_proxy.routing.policies.cache_feedback import CacheFeedback, PromptText
from omni_proxy.routing.policies.least_request import (
    CandidateWeights,
    least,
    load_of,
    load_word,
)
from omni_proxy.routing.policies.policy import Policy, RandomBelow
from omni_proxy.routing.policies.slow_start import SlowStart
from omni_proxy.routing.prefix_tree import PrefixTree
from omni_proxy.routing.tree_key import tree_key

# With `count` candidates, a check of the balance of loads is reused for count // LOADS_FOR picks,
# and a list of the smallest trees for count // SIZES_FOR: sizes change more slowly.
LOADS_FOR = 64
SIZES_FOR = 16
# Trees up to this many times the smallest, plus the text itself, count as equally small: the worker
# with the shortest queue among them is picked. By size alone, requests would wait at one worker
# while another is idle.
ALIKE = 1.5


_Rank = tuple[float, float, int]  # load and tree size per unit of weight, index in the candidates


class CacheChoice(NamedTuple):
    """The chosen worker and the reason. `matched`: in bytes, or tokens."""

    worker: Worker
    branch: str
    ties: int
    matched: int = 0
    holders: tuple[Worker, ...] = ()
    spared: tuple[Worker, ...] = ()
    sizes: Sequence[float] = ()  # of the trees, if they were compared
    ranked: Sequence[_Rank] = ()
    cost: PromptCost | None = None


_NO_TEXT = PromptText(b"", 0, b"")


class CacheAware(Policy):
    """`now` is monotonic seconds, as in `maintain`."""

    __slots__ = (
        "_among", "_branches", "_evict_at", "_evicting", "_feedback", "_hints", "_imbalance",
        "_matched", "_now", "_rules", "_seen", "_slow_start", "_small", "_tree", "_turn",
        "_weights", "name",
    )  # fmt: skip

    @classmethod
    def create(cls, routing: RoutingConfig, random_below: RandomBelow, now: float) -> CacheAware:
        return cls(routing, now)

    def __init__(self, routing: RoutingConfig, now: float) -> None:
        self.name = "cache_aware"
        self._rules = routing.cache_aware
        self._tree: PrefixTree[Worker] = PrefixTree(self._rules.max_tree_size)
        self._feedback = CacheFeedback(self._tree, self._rules)
        self._hints: ClusterHints | None = None
        self._weights = CandidateWeights()
        self._slow_start = SlowStart(self._rules.warmup_share)
        self._turn = 0
        self._branches: Counter[str] = Counter()
        self._matched = self._seen = 0
        self._now = now
        self._evict_at = now + self._rules.eviction_interval_secs
        self._evicting = False
        # Results that are reused for picks among the same candidates: whether loads are imbalanced,
        # with the number of picks left; and the workers with the smallest trees.
        self._imbalance: tuple[Sequence[Worker], bool, int] = ((), False, 0)
        self._small: tuple[Sequence[Worker], list[Worker]] = ((), [])
        # The mask of the latest candidates, valid while the tree has the same holders.
        self._among: tuple[Sequence[Worker], int, int] = ((), -1, 0)

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        text = prompt_text(candidates, requirements)
        choice = self._choose(candidates, text, requirements)
        self._count_choice(choice, candidates, text.length)
        if text.whole:
            self._feedback.insert(text, choice.worker, requirements)
            if self._hints is not None:
                sent = choice.matched if choice.branch in ("matched", "published") else 0
                cached_bytes = text.start + sent
                self._hints.note_prompt(text.whole, cached_bytes, choice.worker)
        return choice.worker

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        text = prompt_text(candidates, requirements)
        imbalance = self._imbalance
        choice = self._choose(candidates, text, requirements)
        self._imbalance = imbalance  # a preview must not use up a reused result
        return choice.worker, self._words(choice, text)

    def explain_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> dict[str, object]:
        text = prompt_text(candidates, requirements)
        lengths = self._cached_lengths(text, candidates)
        matched = {worker.url: lengths.get(worker, 0) for worker in candidates}
        reports = self._feedback.facts(candidates)
        costs: dict[str, object] = {}
        if self._rules.score == "cost" and text.whole:
            cost = self._cost(candidates, text, requirements)
            costs["cost"] = {worker.url: cost.terms(worker) for worker in candidates}
        return {
            "text_bytes": text.length,
            "matched_bytes": matched,
            **costs,
            **({"cache_reports": reports} if reports else {}),
        }

    def cached_prefix(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[bytes, dict[Worker, int]]:
        text = prompt_text(candidates, requirements)
        if not text.whole:
            return b"", {}
        mark = text.start - 1  # the mark before the text does not count
        return text.whole[mark:], self._cached_lengths(text, candidates)

    def record_pick(self, worker: Worker, requirements: Requirements) -> None:
        text = prompt_text((worker,), requirements)
        if text.whole:
            self._feedback.insert(text, worker, requirements)
            if self._hints is not None:
                self._hints.note_prompt(text.whole, 0, worker)

    def use_hints(self, hints: ClusterHints) -> None:
        self._hints = hints

    def reconfigure(self, routing: RoutingConfig) -> bool:
        rules = self._rules = routing.cache_aware
        self._feedback.rules = rules
        self._tree.max_size = rules.max_tree_size
        self._slow_start.share = rules.warmup_share
        self._evict_at = min(self._evict_at, self._now + rules.eviction_interval_secs)
        self._evicting |= self._tree.oversized
        self._imbalance, self._small = ((), False, 0), ((), [])  # computed with the old rules
        return True

    def forget_worker(self, worker: Worker) -> None:
        self._small = ((), [])
        self._among = ((), -1, 0)
        self._tree.forget(worker)
        self._feedback.forget_worker(worker)
        self._slow_start.forget_worker(worker)

    def maintain(self, now: float) -> None:
        self._now = now
        if now >= self._evict_at:
            self._evict_at = now + self._rules.eviction_interval_secs
            self._evicting = True
        more = self._tree.maintain(evict=self._evicting)
        self._evicting &= more

    @property
    def prefix_tree(self) -> PrefixTree[Worker]:
        return self._tree

    def adopt_tree(self, tree: PrefixTree[Worker]) -> None:
        tree.max_size = self._rules.max_tree_size
        self._tree = tree
        self._feedback = CacheFeedback(tree, self._rules)
        self._imbalance, self._small, self._among = ((), False, 0), ((), []), ((), -1, 0)
        self._evicting |= tree.oversized

    def stats(self) -> dict[str, object]:
        tree = self._tree
        return {
            "tree_size": tree.size,
            "max_tree_size": tree.max_size,
            "tree_nodes": tree.nodes,
            "tree_size_by_worker": {w.url: tree.size_of(w) for w in tree.holders()},
            "picks": dict(self._branches),
            "corrections": self._feedback.corrections,
            "matched_ratio": round(self._matched / self._seen, 4) if self._seen else None,
        }

    def _count_choice(self, choice: CacheChoice, candidates: Sequence[Worker], length: int) -> None:
        """Record that a request is sent as chosen; `length`: of its prompt, in bytes or tokens."""
        if choice.ties > 1:
            self._turn += 1
        if choice.branch == "smallest_tree":
            self._chose_small(choice, candidates)
        self._branches[choice.branch] += 1
        self._matched += choice.matched
        self._seen += length

    def _choose(
        self, candidates: Sequence[Worker], text: PromptText, requirements: Requirements
    ) -> CacheChoice:
        rules = self._rules
        if not text.whole:
            return self._shortest_queue(candidates, "no_text")
        if rules.spill == "global" and self._imbalanced(candidates):
            return self._shortest_queue(candidates, "imbalanced")
        if rules.score == "cost":
            return self._by_cost(candidates, text, requirements)
        depth, holders = self._tree.match(text.key, self._mask_of(candidates))
        matched, branch = text.matching(depth), "matched"
        matching_workers: Sequence[Worker] | None = None
        if self._hints is not None and (hinted := self._hinted_lengths(text, matched, candidates)):
            matched, branch = max(hinted.values()), "published"
            matching_workers = [worker for worker, length in hinted.items() if length == matched]
        if matched > rules.cache_threshold * text.length:
            matching_workers = (
                self._tree.named(holders) if matching_workers is None else matching_workers
            )
            choice = self._among_holders(matched, matching_workers, branch)
            if rules.spill == "chosen" and self._spills(choice.worker, candidates):
                return self._shortest_queue(candidates, "spilled", choice)
            return choice
        return self._without_match(candidates, len(text.key), matched)

    def _inferred(self, text: PromptText, candidates: Sequence[Worker]) -> int:
        """The most bytes of the text that a candidate holds, by the tree."""
        return text.matching(self._tree.match(text.key, self._mask_of(candidates))[0])

    def _hinted_lengths(
        self, text: PromptText, matched: int, candidates: Sequence[Worker]
    ) -> dict[Worker, int]:
        """Bytes of the text that other proxies sent to each candidate, if more than `matched`."""
        if self._hints is None:
            return {}
        hinted = self._hints.hinted_lengths(text.whole, text.start + matched, candidates)
        return {worker: length - text.start for worker, length in hinted.items()}

    def _cached_lengths(
        self, text: PromptText, candidates: Sequence[Worker], mask: int = -1
    ) -> dict[Worker, int]:
        """Bytes of the text by worker, for workers that hold any."""
        matching = (
            (w, text.matching(depth)) for w, depth in self._tree.depths(text.key, mask).items()
        )
        lengths = {worker: length for worker, length in matching if length}
        for worker, length in self._hinted_lengths(text, 0, candidates).items():
            lengths[worker] = max(length, lengths.get(worker, 0))
        return lengths

    def _without_match(
        self, candidates: Sequence[Worker], added_bytes: int, matched: int
    ) -> CacheChoice:
        """`added_bytes`: bytes that the tree of the chosen worker grows by."""
        if self._rules.fallback == "least_loaded":
            return self._shortest_queue(candidates, "least_loaded", matched=matched)
        return self._smallest_tree(candidates, added_bytes, matched)

    def _by_cost(
        self, candidates: Sequence[Worker], text: PromptText, requirements: Requirements
    ) -> CacheChoice:
        cost = self._cost(candidates, text, requirements)
        worker, ties = cheapest(cost, candidates, self._turn)
        choice = CacheChoice(worker, "cost", ties, cost.cached_bytes.get(worker, 0), cost=cost)
        if self._rules.spill == "chosen" and self._spills(worker, candidates):
            return self._shortest_queue(candidates, "spilled", choice)
        return choice

    def _cost(
        self, candidates: Sequence[Worker], text: PromptText, requirements: Requirements
    ) -> PromptCost:
        lengths = self._cached_lengths(text, candidates, self._mask_of(candidates))
        tokens = count_prompt_tokens(text.length, requirements)
        return PromptCost(tokens, lengths, self._feedback.reports, self._rules)

    def _shortest_queue(
        self,
        candidates: Sequence[Worker],
        branch: str,
        instead: CacheChoice | None = None,
        matched: int = 0,
    ) -> CacheChoice:
        worker, ties = least(candidates, self._turn)
        if instead is None:
            return CacheChoice(worker, branch, ties, matched)
        return instead._replace(worker=worker, branch=branch, ties=ties)

    def _among_holders(
        self, matched: int, holders: Sequence[Worker], branch: str = "matched"
    ) -> CacheChoice:
        if self._rules.holders == "all":
            worker, ties = least(holders, self._turn)
        else:
            worker, ties = holders[self._turn % len(holders)], len(holders)
        return CacheChoice(worker, branch, ties, matched, tuple(holders))

    def _smallest_tree(
        self, candidates: Sequence[Worker], added_bytes: int, matched: int = 0
    ) -> CacheChoice:
        of, small = self._small
        if of is candidates and small:
            return CacheChoice(small[-1], "smallest_tree", 0, matched)
        sizes = self._sizes(candidates)
        spared = self._slow_start.spared(candidates, sizes)
        ranked = _small_alike(candidates, sizes, spared, added_bytes)
        if self._feedback.is_small_by_eviction(candidates[min(ranked)[2]], candidates):
            ranked = _ranks(candidates, sizes, spared)
        best = min(ranked)[:2]
        ties = [index for load, size, index in ranked if (load, size) == best]
        worker = candidates[ties[self._turn % len(ties)]]
        return CacheChoice(
            worker, "smallest_tree", len(ties), matched, (), tuple(spared), sizes, ranked
        )

    def _chose_small(self, choice: CacheChoice, candidates: Sequence[Worker]) -> None:
        if not choice.ranked:
            self._small[1].pop()
            return
        self._slow_start.record_choice(choice.worker, candidates, choice.sizes)
        if reuse_count := _reuse_count(candidates, SIZES_FOR):
            ranked = nsmallest(reuse_count + 1, choice.ranked)
            next_ones = [candidates[index] for _, _, index in reversed(ranked)]
            self._small = (
                candidates,
                [candidate for candidate in next_ones if candidate is not choice.worker],
            )

    def _sizes(self, candidates: Sequence[Worker]) -> Sequence[float]:
        sizes = self._tree.sizes_of(candidates)
        if self._weights.take(candidates) and candidates[0].weight == 1:
            return sizes
        return [size / worker.weight for size, worker in zip(sizes, candidates, strict=True)]

    def _mask_of(self, candidates: Sequence[Worker]) -> int:
        of, membership, mask = self._among
        if of is not candidates or membership != self._tree.membership:
            mask = self._tree.mask_of(candidates)
            self._among = (candidates, self._tree.membership, mask)
        return mask

    def _load(self, worker: Worker) -> float:
        """Its load; if weights differ, scaled to the mean weight."""
        weights = self._weights
        return load_of(worker) if weights.even else load_of(worker) * weights.mean / worker.weight

    def _imbalanced(self, candidates: Sequence[Worker]) -> bool:
        of, outcome, picks = self._imbalance
        if of is candidates and picks:
            self._imbalance = (of, outcome, picks - 1)
            return outcome
        outcome = self._loads_differ(candidates)
        self._imbalance = (candidates, outcome, _reuse_count(candidates, LOADS_FOR))
        return outcome

    def _loads_differ(self, candidates: Sequence[Worker]) -> bool:
        if self._weights.take(candidates):
            # inlined: load_of
            loads = [worker.in_flight + worker.load_offset for worker in candidates]
        else:
            loads = [self._load(worker) for worker in candidates]
        low, high = min(loads), max(loads)
        rules = self._rules
        return high - low > rules.balance_abs_threshold and high > rules.balance_rel_threshold * low

    def _spills(self, worker: Worker, candidates: Sequence[Worker]) -> bool:
        self._weights.take(candidates)
        mean = sum(map(self._load, candidates)) / len(candidates)
        load = self._load(worker)
        rules = self._rules
        return load > rules.balance_rel_threshold * mean and (
            load > mean + rules.balance_abs_threshold
        )

    def _words(self, choice: CacheChoice, text: PromptText) -> str:
        return self._words_for(choice, f"{choice.matched} of {text.length} bytes match")

    def _words_for(self, choice: CacheChoice, share: str) -> str:
        worker = choice.worker
        queue = f"the shortest queue is taken: {load_word(worker)}"
        branch = choice.branch
        if branch == "no_text":
            return f"the request has no text, {queue}"
        if branch == "imbalanced":
            return f"loads differ beyond the balance thresholds, {queue}"
        if branch == "spilled":
            return f"{share}, but its holders have too much in flight; {queue}"
        if branch == "cost" and choice.cost is not None:
            uncached, backlog, running = choice.cost.terms(worker).values()
            return (
                f"the lowest cost: {uncached} tokens to compute, {backlog} before them, "
                f"and {running} for requests in flight; {share}"
            )
        if branch in ("matched", "published"):
            names = ", ".join(holder.display_id for holder in choice.holders)
            source = ", as another proxy has published" if branch == "published" else ""
            return f"{share}, held by {names}{source}"
        if branch == "least_loaded":
            return f"only {share}, {queue}"
        size = self._tree.size_of(worker)
        spared = ", ".join(candidate.display_id for candidate in choice.spared)
        warming_note = f" (not {spared}, which warms up)" if spared else ""
        smaller = any(size_of_other < size / worker.weight for _, size_of_other, _ in choice.ranked)
        tree_text = "a small tree with the shortest queue" if smaller else "the smallest tree"
        return f"only {share}, {tree_text} is taken: {size} bytes{warming_note}"


def _reuse_count(candidates: Sequence[Worker], candidate: int) -> int:
    """For how many further picks the result of a full scan is reused."""
    count = len(candidates)
    return count // candidate if count > EXACT else 0


def _small_alike(
    candidates: Sequence[Worker],
    sizes: Sequence[float],
    spared: Collection[Worker],
    added_bytes: int,
) -> list[_Rank]:
    """Ranks of workers whose tree is the smallest or hardly larger; `added_bytes`: to be added."""
    rest = _ranks(candidates, sizes, spared)
    bound = min(size for _, size, _ in rest) * ALIKE + added_bytes
    return [rank for rank in rest if rank[1] <= bound]


def _ranks(
    candidates: Sequence[Worker], sizes: Sequence[float], spared: Collection[Worker]
) -> list[_Rank]:
    out = set(spared)
    # inlined: load_of
    return [
        ((worker.in_flight + worker.load_offset) / worker.weight, size, index)
        for index, (size, worker) in enumerate(zip(sizes, candidates, strict=True))
        if worker not in out
    ]


def prompt_text(candidates: Sequence[Worker], requirements: Requirements) -> PromptText:
    text = prefix_text(requirements.body_fields)
    if not text:
        return _NO_TEXT
    # If workers name models, the candidates for a model are those that name it. An engine caches
    # each adapter separately.
    model = requirements.model if candidates[0].serves(requirements.model) else ""
    name = (model or "").encode("utf-8", "surrogatepass")
    # The leading mark does not count as matched: all texts of a kind share it.
    whole = name + text
    return PromptText(whole, len(name) + 1, tree_key(whole))
