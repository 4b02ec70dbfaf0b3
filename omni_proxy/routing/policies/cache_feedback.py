"""What cache_aware learns of the workers' caches: texts when they are sent, corrections by answers.

Below what a worker reports to have had of a prompt, its part of the tree is forgotten, with the
branches behind it, except the prompt itself and what may have been on its way to the worker then.
Invariants: an answer is learned from once; a worker that reports nothing, or 0 always, is left
alone; without `feedback` and the cost model only the tree is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from omni_proxy.config.schema import CacheAwareConfig, RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cache_prediction import (
    CachePrediction,
    CacheReports,
    without_those_of,
)
from omni_proxy.routing.inspect.prefix_text import LIMIT, has_one_prompt
from omni_proxy.routing.inspect.requirements import AUDIO, IMAGE, VIDEO, Requirements
from omni_proxy.routing.policies.cache_cost import count_prompt_tokens, uncached_tokens
from omni_proxy.routing.prefix_tree import InsertedText, PrefixTree
from omni_proxy.routing.tree_key import key_length, text_length

# Engines reuse whole blocks, of 1 to 128 tokens, and compute a prompt's last token always. What is
# missing beyond a block and half of what was reported has been evicted: bytes become tokens by
# their mean over the prompt, and a prefix that all prompts share may be twice as dense as the rest.
BLOCK_TOKENS = 128
# An engine that reports 0 so many times where more was predicted, and never more, has no cache.
MISSES = 16
MEDIA = IMAGE | AUDIO | VIDEO
CUT_LENGTH = LIMIT - 1  # beside the mark


class PromptText(NamedTuple):
    whole: bytes  # the model's name, then the prefix text, which begins with a mark
    start: int  # where the text itself begins
    key: bytes  # of the whole, as in the tree

    @property
    def length(self) -> int:
        return len(self.whole) - self.start

    def matching(self, depth: int) -> int:
        """How many bytes of the text match where so many of its key do. The end of a text that is
        no whole block counts with the last one."""
        whole = len(self.whole) if depth >= len(self.key) else text_length(depth)
        return max(0, whole - self.start)


class CacheFeedback:
    """`tree`: that of the policy; `rules`: those in force."""

    __slots__ = ("_number", "_tree", "corrections", "reports", "rules")

    def __init__(self, tree: PrefixTree[Worker], rules: CacheAwareConfig) -> None:
        self.rules = rules
        self.corrections = 0
        self.reports: dict[Worker, CacheReports] = {}
        self._tree = tree
        self._number = 0  # of the newest text

    def insert(self, text: PromptText, worker: Worker, requirements: Requirements) -> None:
        """The worker gets the text: it holds it from now on."""
        rules = self.rules
        if not rules.feedback and rules.score != "cost":
            self._tree.insert(text.key, worker)
            return
        self._number = number = self._number + 1
        reports = self.reports.get(worker) or self._reports_of(worker)
        skips, counts_cost = reports.skips, rules.score == "cost"
        if skips and not counts_cost:
            reports.skips = skips - 1
            self._tree.insert(text[2], worker, number)
            if requirements.prediction is not None:
                self._end_attempt(requirements)
            return
        reports.skips = reports.period - 1
        whole, start, key = text
        inserted = self._tree.insert(key, worker, number)
        prediction = CachePrediction(
            self, worker, reports, inserted, start, len(whole) - start, 0, number
        )
        if counts_cost:
            held = text.matching(inserted.held) if inserted is not None else 0
            tokens = count_prompt_tokens(text.length, requirements)
            prediction.uncached = uncached_tokens(tokens, held)
        if requirements.mask & MEDIA or not has_one_prompt(requirements.body_fields):
            # Its tokens are not those of the text alone, or of one text.
            prediction.text, prediction.length = None, 0
        self._sent(prediction, reports, requirements)

    def expect(self, worker: Worker, requirements: Requirements, tokens: int, held: int) -> None:
        """The worker gets a prompt of so many tokens, and is known to have `held` of them."""
        reports = self.reports.get(worker) or self._reports_of(worker)
        self._number = number = self._number + 1
        if not self.rules.feedback:
            return
        if reports.skips:
            reports.skips -= 1
            self._end_attempt(requirements)
            return
        reports.skips = reports.period - 1
        prediction = CachePrediction(self, worker, reports, None, 0, tokens, held, number)
        self._sent(prediction, reports, requirements)

    def _end_attempt(self, requirements: Requirements) -> None:
        """What was predicted for an earlier attempt does not hold for this one."""
        requirements.prediction = without_those_of(self, requirements.prediction)

    def _reports_of(self, worker: Worker) -> CacheReports:
        reports = self.reports[worker] = CacheReports()
        return reports

    def _sent(
        self, prediction: CachePrediction, reports: CacheReports, requirements: Requirements
    ) -> None:
        if requirements.prediction is not None:
            prediction.former = without_those_of(self, requirements.prediction)
        number, waiting = prediction.number, reports.unanswered
        prediction.before = reports.oldest_unanswered(number) if waiting else number
        requirements.prediction = prediction
        waiting.append(prediction)
        reports.backlog += prediction.uncached

    def learn(self, prediction: CachePrediction, cached: int, prompt: int, sent: int) -> int | None:
        """As `CacheLearner`. Forgets what the worker had less than predicted."""
        text, reports, length = prediction.text, prediction.reports, prediction.length
        if text is None:
            if not length:
                return None
            predicted = min(prediction.held, prompt)
            reports.note(predicted, cached)
            # Its blocks were counted: nothing was inferred, so nothing is corrected.
            self._judge(prediction, agrees=predicted <= cached + BLOCK_TOKENS)
            return predicted
        held = length
        if text.held < text.length:
            held = max(0, text_length(text.held) - prediction.start)
        if length >= CUT_LENGTH:  # the text was cut, and the request is longer
            length = max(length, sent)
        predicted = held * prompt // length
        reports.note(predicted, cached)
        agrees = predicted <= cached + BLOCK_TOKENS  # else it may be nothing but a block
        if self._judge(prediction, agrees=agrees) and not agrees:
            self._correct(prediction, text, cached, predicted, length / prompt)
        return predicted

    def _judge(self, prediction: CachePrediction, *, agrees: bool) -> bool:
        """Whether a difference may be learned from."""
        if self.rules.score == "cost":  # whose backlog needs all prompts
            prediction.reports.silent = 0
            return True
        return prediction.reports.judge(prediction.number, self._number, agrees=agrees)

    def _correct(
        self, prediction: CachePrediction, text: InsertedText, cached: int, predicted: int,
        bytes_each: float,
    ) -> None:  # fmt: skip
        """Forget what the worker had less than predicted, if that is clearly less."""
        reports, most = prediction.reports, cached + cached // 2 + BLOCK_TOKENS
        if predicted > most and self.rules.feedback and reports.misses < MISSES:
            kept = key_length(prediction.start + int(most * bytes_each))
            self._tree.forget_below(text, prediction.worker, kept, prediction.before)
            reports.corrections += 1
            self.corrections += 1

    def is_small_by_eviction(self, worker: Worker, candidates: Sequence[Worker]) -> bool:
        """Whether it has the smallest tree for what it has evicted, and enough to do: it would get
        every request without a match."""
        reports = self.reports.get(worker)
        if reports is None or not reports.corrections:
            return False
        loads = [candidate.in_flight / candidate.weight for candidate in candidates]
        return worker.in_flight / worker.weight > sum(loads) / len(loads) + 1

    def facts(self, workers: Iterable[Worker]) -> dict[str, dict[str, int]]:
        """JSON-able, by URL; without those that have reported nothing."""
        known = ((worker, self.reports.get(worker)) for worker in workers)
        return {
            worker.url: reports.as_facts()
            for worker, reports in known
            if reports is not None and reports.answers
        }

    def forget_worker(self, worker: Worker) -> None:
        self.reports.pop(worker, None)


def learns_from_answers(routing: RoutingConfig) -> bool:
    """Whether a policy of this configuration reads what answers report."""
    pools = routing.disaggregation
    policies = (routing.policy, pools.prefill_policy, pools.decode_policy)
    uses = "cache_aware" in policies or bool(pools.min_uncached_tokens)
    return uses and routing.cache_aware.feedback
