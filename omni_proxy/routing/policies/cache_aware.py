"""Cache-aware routing: a request goes to a worker that was sent the same prefix before.

    loads differ too much -> shortest queue                     (spill = "global")
    match > threshold     -> a holder of the longest match      (or, if its load is too high,
                                                                 shortest queue: spill = "chosen")
    else                  -> smallest tree, or least loaded     (fallback)

The chosen worker holds the text from then on, until its answer reports less (`feedback`).
Invariants: equal workers take turns; a preview changes nothing; one tree, bounded in total, keyed
by the models that workers name; what may be on its way to a worker is not unlearned. Beyond `EXACT`
candidates, checks of all are reused for a share of the picks. Source: routers.md 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from heapq import nsmallest
from typing import NamedTuple

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cache_prediction import (
    CachePrediction,
    CacheReports,
    without_those_of,
)
from omni_proxy.routing.inspect.prefix_text import LIMIT, has_one_prompt, prefix_text
from omni_proxy.routing.inspect.requirements import AUDIO, IMAGE, VIDEO, Requirements
from omni_proxy.routing.policies.least_request import CandidateWeights, least, load_word
from omni_proxy.routing.policies.policy import Policy, RandomBelow
from omni_proxy.routing.prefix_tree import PrefixTree

EXACT = 64
# One pick more for so many candidates goes by the same verdict on the balance of their loads, and
# by the same list of the smallest trees, which change less.
LOADS_FOR = 64
SIZES_FOR = 16
# Trees up to so many times the smallest, and the text itself, are small alike: of those the
# shortest queue is taken. By size alone requests would wait at one worker while another is idle.
ALIKE = 1.5
# Engines reuse whole blocks, of 1 to 128 tokens, and compute a prompt's last token always. What is
# missing beyond a block and half of what was reported has been evicted: bytes become tokens by
# their mean over the prompt, and a prefix that all prompts share may be twice as dense as the rest.
BLOCK_TOKENS = 128
# An engine that reports 0 so many times where more was predicted, and never more, has no cache.
MISSES = 16
MEDIA = IMAGE | AUDIO | VIDEO


_Rank = tuple[float, float, int]  # load and size of tree by weight, place in the candidates


class _Text(NamedTuple):
    whole: bytes  # as in the tree: the model's name, then the prefix text, which begins with a mark
    start: int  # where the text itself begins

    @property
    def length(self) -> int:
        return len(self.whole) - self.start


class CacheChoice(NamedTuple):
    """What was chosen and why. `matched`: in bytes, or tokens."""

    worker: Worker
    branch: str
    ties: int
    matched: int = 0
    holders: tuple[Worker, ...] = ()
    spared: tuple[Worker, ...] = ()
    sizes: Sequence[float] = ()  # of the trees, if they were compared
    ranked: Sequence[_Rank] = ()


_NO_TEXT = _Text(b"", 0)


class CacheAware(Policy):
    """`now` is monotonic seconds, as in `maintain`."""

    __slots__ = (
        "_among",
        "_branches",
        "_corrections",
        "_evict_at",
        "_evicting",
        "_judged",
        "_matched",
        "_now",
        "_number",
        "_reports",
        "_rules",
        "_seen",
        "_slow_start",
        "_small",
        "_tree",
        "_turn",
        "_weights",
        "name",
    )  # fmt: skip

    @classmethod
    def create(cls, routing: RoutingConfig, random_below: RandomBelow, now: float) -> CacheAware:
        return cls(routing, now)

    def __init__(self, routing: RoutingConfig, now: float) -> None:
        self.name = "cache_aware"
        self._rules = routing.cache_aware
        self._tree: PrefixTree[Worker] = PrefixTree(self._rules.max_tree_size)
        self._weights = CandidateWeights()
        self._slow_start = SlowStart(self._rules.warmup_share)
        self._turn = 0
        self._branches: Counter[str] = Counter()
        self._matched = self._seen = self._corrections = 0
        self._number = 0  # of the newest text
        self._reports: dict[Worker, CacheReports] = {}
        self._now = now
        self._evict_at = now + self._rules.eviction_interval_secs
        self._evicting = False
        # Good for so many picks among the same candidates: the verdict on their balance, and who
        # had the smallest trees.
        self._judged: tuple[Sequence[Worker], bool, int] = ((), False, 0)
        self._small: tuple[Sequence[Worker], list[Worker]] = ((), [])
        # The mask of the last candidates, while the tree has the same holders.
        self._among: tuple[Sequence[Worker], int, int] = ((), -1, 0)

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        text = _text(candidates, requirements)
        choice = self._choose(candidates, text)
        self._count_choice(choice, candidates, text.length)
        if text.whole:
            self._add(text, choice.worker, requirements)
        return choice.worker

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        text = _text(candidates, requirements)
        judged = self._judged
        choice = self._choose(candidates, text)
        self._judged = judged  # else the next pick could go by another verdict
        return choice.worker, self._words(choice, text)

    def explain_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> dict[str, object]:
        text = _text(candidates, requirements)
        depths = self._tree.depths(text.whole)
        matched = {worker.url: max(0, depths.get(worker, 0) - text.start) for worker in candidates}
        reports = {
            worker.url: reports.as_facts()
            for worker in candidates
            if (reports := self._reports.get(worker)) is not None and reports.answers
        }
        return {
            "text_bytes": text.length,
            "matched_bytes": matched,
            **({"cache_reports": reports} if reports else {}),
        }

    def cached_prefix(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[bytes, dict[Worker, int]]:
        text = _text(candidates, requirements)
        if not text.whole:
            return b"", {}
        mark = text.start - 1  # which begins the text and does not count
        depths = self._tree.depths(text.whole)
        return text.whole[mark:], {
            worker: depth - text.start for worker, depth in depths.items() if depth > text.start
        }

    def record_pick(self, worker: Worker, requirements: Requirements) -> None:
        text = _text((worker,), requirements)
        if text.whole:
            self._add(text, worker, requirements)

    def learn(self, prediction: CachePrediction, cached: int, prompt: int, sent: int) -> int | None:
        """As `CacheLearner`. Forgets what the worker had less than predicted."""
        text, reports = prediction.text, prediction.reports
        if text is None:
            return None
        length = text.length - prediction.start
        if (
            length >= LIMIT - 1
        ):  # beside the mark; there was more of it; the request is longer still: careful
            length = max(length, sent)
        predicted = min(prompt, max(0, text.held - prediction.start) * prompt // length)
        reports.note(predicted, cached)
        most = cached + cached // 2 + BLOCK_TOKENS
        if predicted > most and self._rules.feedback and reports.misses < MISSES:
            kept = prediction.start + most * length // prompt
            self._tree.forget_below(text, prediction.worker, kept, prediction.before)
            self._corrections += 1
        return predicted

    def reconfigure(self, routing: RoutingConfig) -> bool:
        rules = self._rules = routing.cache_aware
        self._tree.max_size = rules.max_tree_size
        self._slow_start.share = rules.warmup_share
        self._evict_at = min(self._evict_at, self._now + rules.eviction_interval_secs)
        self._evicting |= self._tree.oversized
        self._judged, self._small = ((), False, 0), ((), [])  # they went by the old ones
        return True

    def forget_worker(self, worker: Worker) -> None:
        self._small = ((), [])
        self._among = ((), -1, 0)
        self._tree.forget(worker)
        self._reports.pop(worker, None)
        self._slow_start.forget_worker(worker)

    def maintain(self, now: float) -> None:
        self._now = now
        if now >= self._evict_at:
            self._evict_at = now + self._rules.eviction_interval_secs
            self._evicting = True
        more = self._tree.maintain(evict=self._evicting)
        self._evicting &= more

    def stats(self) -> dict[str, object]:
        tree = self._tree
        return {
            "tree_size": tree.size,
            "max_tree_size": tree.max_size,
            "tree_nodes": tree.nodes,
            "tree_size_by_worker": {w.url: tree.size_of(w) for w in tree.holders()},
            "picks": dict(self._branches),
            "corrections": self._corrections,
            "matched_ratio": round(self._matched / self._seen, 4) if self._seen else None,
        }

    def _add(self, text: _Text, worker: Worker, requirements: Requirements) -> None:
        """The worker gets the text: it holds it from now on."""
        if not self._rules.feedback:
            self._tree.insert(text.whole, worker)
            return
        self._number = number = self._number + 1
        inserted = self._tree.insert(text.whole, worker, number)
        reports = self._reports.get(worker)
        if reports is None:
            reports = self._reports[worker] = CacheReports()
        before = reports.oldest_unanswered(number)
        if requirements.mask & MEDIA or not has_one_prompt(requirements.body_fields):
            inserted = None  # its tokens are not those of the text alone, or of one text
        former = requirements.prediction
        if former is not None:
            former = without_those_of(self, former)
        prediction = requirements.prediction = CachePrediction(
            self, worker, reports, inserted, text.start, number, before, former=former
        )
        reports.unanswered.append(prediction)

    def _count_choice(self, choice: CacheChoice, candidates: Sequence[Worker], length: int) -> None:
        """A request goes where `choice` says; `length`: of its prompt, in bytes or tokens."""
        if choice.ties > 1:
            self._turn += 1
        if choice.branch == "smallest_tree":
            self._chose_small(choice, candidates)
        self._branches[choice.branch] += 1
        self._matched += choice.matched
        self._seen += length

    def _choose(self, candidates: Sequence[Worker], text: _Text) -> CacheChoice:
        rules = self._rules
        if not text.whole:
            return self._shortest_queue(candidates, "no_text")
        if rules.spill == "global" and self._imbalanced(candidates):
            return self._shortest_queue(candidates, "imbalanced")
        length, holders = self._tree.match(text.whole, self._mask_of(candidates))
        matched = max(0, length - text.start)
        if matched > rules.cache_threshold * text.length:
            choice = self._among_holders(matched, self._tree.named(holders))
            if rules.spill == "chosen" and self._spills(choice.worker, candidates):
                return self._shortest_queue(candidates, "spilled", choice)
            return choice
        return self._without_match(candidates, text.length, matched)

    def _without_match(
        self, candidates: Sequence[Worker], length: int, matched: int
    ) -> CacheChoice:
        if self._rules.fallback == "least_loaded":
            return self._shortest_queue(candidates, "least_loaded")._replace(matched=matched)
        return self._smallest_tree(candidates, length)._replace(matched=matched)

    def _shortest_queue(
        self, candidates: Sequence[Worker], branch: str, instead: CacheChoice | None = None
    ) -> CacheChoice:
        worker, ties = least(candidates, self._turn)
        if instead is None:
            return CacheChoice(worker, branch, ties)
        return instead._replace(worker=worker, branch=branch, ties=ties)

    def _among_holders(self, matched: int, holders: Sequence[Worker]) -> CacheChoice:
        if self._rules.holders == "all":
            worker, ties = least(holders, self._turn)
        else:
            worker, ties = holders[self._turn % len(holders)], len(holders)
        return CacheChoice(worker, "matched", ties, matched, tuple(holders))

    def _smallest_tree(self, candidates: Sequence[Worker], length: int) -> CacheChoice:
        of, small = self._small
        if of is candidates and small:
            return CacheChoice(small[-1], "smallest_tree", 0)
        sizes = self._sizes(candidates)
        spared = self._slow_start.spared(candidates, sizes)
        ranked = _small_alike(candidates, sizes, spared, length)
        best = min(ranked)[:2]
        ties = [index for load, size, index in ranked if (load, size) == best]
        worker = candidates[ties[self._turn % len(ties)]]
        return CacheChoice(
            worker, "smallest_tree", len(ties), spared=tuple(spared), sizes=sizes, ranked=ranked
        )

    def _chose_small(self, choice: CacheChoice, candidates: Sequence[Worker]) -> None:
        if not choice.ranked:
            self._small[1].pop()
            return
        self._slow_start.record_choice(choice.worker, candidates, choice.sizes)
        if good_for := _good_for(candidates, SIZES_FOR):
            ranked = nsmallest(good_for + 1, choice.ranked)
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
        """In flight; where weights differ, as if all had their mean."""
        weights = self._weights
        return worker.in_flight if weights.even else worker.in_flight * weights.mean / worker.weight

    def _imbalanced(self, candidates: Sequence[Worker]) -> bool:
        of, outcome, picks = self._judged
        if of is candidates and picks:
            self._judged = (of, outcome, picks - 1)
            return outcome
        outcome = self._loads_differ(candidates)
        self._judged = (candidates, outcome, _good_for(candidates, LOADS_FOR))
        return outcome

    def _loads_differ(self, candidates: Sequence[Worker]) -> bool:
        if self._weights.take(candidates):
            loads: list[float] = [worker.in_flight for worker in candidates]
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

    def _words(self, choice: CacheChoice, text: _Text) -> str:
        return self._words_for(choice, f"{choice.matched} of {text.length} bytes match")

    def _words_for(self, choice: CacheChoice, share: str) -> str:
        worker = choice.worker
        queue = f"the shortest queue is taken: {load_word(worker)}"
        match choice.branch:
            case "no_text":
                return f"the request has no text, {queue}"
            case "imbalanced":
                return f"loads differ beyond the balance thresholds, {queue}"
            case "spilled":
                return f"{share}, but its holders have too much in flight; {queue}"
            case "matched":
                names = ", ".join(holder.display_id for holder in choice.holders)
                return f"{share}, held by {names}"
            case "least_loaded":
                return f"only {share}, {queue}"
        size = self._tree.size_of(worker)
        spared = ", ".join(candidate.display_id for candidate in choice.spared)
        more = f" (not {spared}, which warms up)" if spared else ""
        smaller = any(size_of_other < size / worker.weight for _, size_of_other, _ in choice.ranked)
        which = "a small tree with the shortest queue" if smaller else "the smallest tree"
        return f"only {share}, {which} is taken: {size} bytes{more}"


def learns_from_answers(routing: RoutingConfig) -> bool:
    """Whether a policy of this configuration reads what answers report."""
    pools = routing.disaggregation
    policies = (routing.policy, pools.prefill_policy, pools.decode_policy)
    uses = "cache_aware" in policies or bool(pools.min_uncached_tokens)
    return uses and routing.cache_aware.feedback


def _good_for(candidates: Sequence[Worker], candidate: int) -> int:
    """How many more picks go by what one has seen that looked at all of them."""
    count = len(candidates)
    return count // candidate if count > EXACT else 0


def _small_alike(
    candidates: Sequence[Worker], sizes: Sequence[float], spared: Collection[Worker], more: int
) -> list[_Rank]:
    """Workers with the smallest tree, or one hardly larger, before `more` bytes are added."""
    out = set(spared)
    rest = [
        (size, index, worker)
        for index, (size, worker) in enumerate(zip(sizes, candidates, strict=True))
        if worker not in out
    ]
    bound = min(rest)[0] * ALIKE + more
    return [
        (worker.in_flight / worker.weight, size, index)
        for size, index, worker in rest
        if size <= bound
    ]


def _text(candidates: Sequence[Worker], requirements: Requirements) -> _Text:
    text = prefix_text(requirements.body_fields)
    if not text:
        return _NO_TEXT
    # Where workers name models, the candidates for a model are those that name it. An engine caches
    # each adapter by itself.
    model = requirements.model if candidates[0].serves(requirements.model) else ""
    name = (model or "").encode("utf-8", "surrogatepass")
    # The mark does not count: all texts of a kind share it.
    return _Text(name + text, len(name) + 1)


# Slow start. A worker that has just joined has the smallest tree for long and would get every
# request without a match. While its tree is below half of the mean it is chosen at most once per
# 1/share choices, but never less often than its fair share.

NEW_SHARE = 0.5  # of the mean size
_WHOLE = 1.0 - 1e-9  # 1/n summed n times


class SlowStart:
    """New workers earn `share` of a pick per choice and save at most one. 0: off."""

    __slots__ = ("_saved", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self._saved: dict[Worker, float] = {}

    def spared(self, candidates: Sequence[Worker], sizes: Sequence[float]) -> list[Worker]:
        """Who can't be chosen now; never all of them."""
        return [
            worker
            for worker in self._new_workers(candidates, sizes)
            if self._with_earned(worker, len(candidates)) < _WHOLE
        ]

    def record_choice(
        self, picked: Worker, candidates: Sequence[Worker], sizes: Sequence[float]
    ) -> None:
        """`sizes` are those that the choice was made by."""
        new_workers = self._new_workers(candidates, sizes)
        earned = {worker: self._with_earned(worker, len(candidates)) for worker in new_workers}
        if self._saved:
            for worker in candidates:
                self._saved.pop(worker, None)
        self._saved |= earned
        if picked in earned:
            self._saved[picked] -= 1

    def forget_worker(self, worker: Worker) -> None:
        self._saved.pop(worker, None)

    def _with_earned(self, worker: Worker, candidates: int) -> float:
        return min(1.0, self._saved.get(worker, 1.0) + max(self.share, 1 / candidates))

    def _new_workers(self, candidates: Sequence[Worker], sizes: Sequence[float]) -> list[Worker]:
        if not self.share or self.share >= 1:
            return []
        bound = NEW_SHARE * sum(sizes) / len(sizes)
        return [worker for worker, size in zip(candidates, sizes, strict=True) if size < bound]
