"""Feedback of cache_aware: adds texts to the tree when they are sent, corrects it by responses.

If a response reports fewer cached tokens than predicted, the worker is removed from the tree below
the reported length, with all branches, except for the prompt itself and for texts that may have
been in flight at the time. Invariants: a response is used once; a worker that reports nothing, or
always 0, is never corrected; without `feedback` and the cost model only the tree is written.
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
from omni_proxy.routing.inspect.requirements import MEDIA, Requirements
from omni_proxy.routing.policies.cache_cost import count_prompt_tokens, uncached_tokens
from omni_proxy.routing.policies.least_request import load_of
from omni_proxy.routing.prefix_tree import InsertedText, PrefixTree
from omni_proxy.routing.tree_key import key_length, text_length

# Engines reuse whole blocks of 1 to 128 tokens, and always compute a prompt's last token. A prefix
# counts as evicted only if the prediction exceeds the report by a block plus half of the report:
# bytes are converted to tokens by the mean of the prompt, and a prefix that all prompts share may
# have twice as many tokens per byte as the rest.
BLOCK_TOKENS = 128
# An engine that reported 0 this many times where more was predicted, and never more, has no cache.
MISSES = 16
CUT_LENGTH = LIMIT - 1  # of a text that was cut, without its mark


class PromptText(NamedTuple):
    whole: bytes  # the model's name, then the prefix text, which begins with a mark
    start: int  # offset of the text itself in `whole`
    key: bytes  # `tree_key` of `whole`

    @property
    def length(self) -> int:
        return len(self.whole) - self.start

    def matching(self, depth: int) -> int:
        """Matching bytes of the text if the first `depth` bytes of its key match. A partial block
        at the end of the text matches if all of the key does."""
        whole = len(self.whole) if depth >= len(self.key) else text_length(depth)
        return max(0, whole - self.start)


class CacheFeedback:
    """`tree`: the policy's tree; `rules`: the current settings."""

    __slots__ = ("_number", "_tree", "corrections", "reports", "rules")

    def __init__(self, tree: PrefixTree[Worker], rules: CacheAwareConfig) -> None:
        self.rules = rules
        self.corrections = 0
        self.reports: dict[Worker, CacheReports] = {}
        self._tree = tree
        self._number = 0  # sequence number of the newest text

    def insert(self, text: PromptText, worker: Worker, requirements: Requirements) -> None:
        """The text is sent to the worker, which counts as its holder from now on."""
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
            cached_bytes = text.matching(inserted.held) if inserted is not None else 0
            tokens = count_prompt_tokens(text.length, requirements)
            prediction.uncached = uncached_tokens(tokens, cached_bytes)
        if requirements.mask & MEDIA or not has_one_prompt(requirements.body_fields):
            # The reported tokens include media, or several prompts.
            prediction.text, prediction.length = None, 0
        self._record_sent(prediction, reports, requirements)

    def expect(
        self, worker: Worker, requirements: Requirements, tokens: int, cached_tokens: int
    ) -> None:
        """A prompt of `tokens` tokens is sent to the worker, which has `cached_tokens` of them."""
        reports = self.reports.get(worker) or self._reports_of(worker)
        self._number = number = self._number + 1
        if not self.rules.feedback:
            return
        if reports.skips:
            reports.skips -= 1
            self._end_attempt(requirements)
            return
        reports.skips = reports.period - 1
        prediction = CachePrediction(self, worker, reports, None, 0, tokens, cached_tokens, number)
        self._record_sent(prediction, reports, requirements)

    def _end_attempt(self, requirements: Requirements) -> None:
        """Drop this policy's predictions of earlier attempts, which don't apply to this one."""
        requirements.prediction = without_those_of(self, requirements.prediction)

    def _reports_of(self, worker: Worker) -> CacheReports:
        reports = self.reports[worker] = CacheReports()
        return reports

    def _record_sent(
        self, prediction: CachePrediction, reports: CacheReports, requirements: Requirements
    ) -> None:
        if requirements.prediction is not None:
            prediction.former = without_those_of(self, requirements.prediction)
        number, waiting = prediction.number, reports.unanswered
        prediction.before = reports.oldest_pending(number) if waiting else number
        requirements.prediction = prediction
        waiting.append(prediction)
        reports.backlog += prediction.uncached

    def learn(self, prediction: CachePrediction, cached: int, prompt: int, sent: int) -> int | None:
        """See `CacheLearner`. Removes prefixes from the tree that the worker no longer has."""
        text, reports, length = prediction.text, prediction.reports, prediction.length
        if text is None:
            if not length:
                return None
            predicted = min(prediction.cached_tokens, prompt)
            reports.note(predicted, cached)
            # The prediction was by KV events, not by the tree: there is nothing to correct.
            self._judge(prediction, agrees=predicted <= cached + BLOCK_TOKENS)
            return predicted
        predicted_bytes = length
        if text.held < text.length:
            predicted_bytes = max(0, text_length(text.held) - prediction.start)
        if length >= CUT_LENGTH:  # the text was cut: the prompt is longer
            length = max(length, sent)
        predicted = predicted_bytes * prompt // length
        reports.note(predicted, cached)
        agrees = predicted <= cached + BLOCK_TOKENS  # the difference may be a partial block
        if self._judge(prediction, agrees=agrees) and not agrees:
            self._correct(prediction, text, cached, predicted, length / prompt)
        return predicted

    def _judge(self, prediction: CachePrediction, *, agrees: bool) -> bool:
        """Whether a difference may be used for a correction."""
        if self.rules.score == "cost":  # the backlog needs a prediction for every prompt
            prediction.reports.silent = 0
            return True
        return prediction.reports.record_agreement(prediction.number, self._number, agrees=agrees)

    def _correct(
        self, prediction: CachePrediction, text: InsertedText, cached: int, predicted: int,
        bytes_each: float,
    ) -> None:  # fmt: skip
        """Remove prefixes of the worker from the tree if it had clearly less than predicted."""
        reports, max_cached = prediction.reports, cached + cached // 2 + BLOCK_TOKENS
        if predicted > max_cached and self.rules.feedback and reports.misses < MISSES:
            kept_length = key_length(prediction.start + int(max_cached * bytes_each))
            self._tree.forget_below(text, prediction.worker, kept_length, prediction.before)
            reports.corrections += 1
            self.corrections += 1

    def is_small_by_eviction(self, worker: Worker, candidates: Sequence[Worker]) -> bool:
        """Whether the worker's tree may be small because of evictions, while its load is above
        average: otherwise it would get every request without a match."""
        reports = self.reports.get(worker)
        if reports is None or not reports.corrections:
            return False
        loads = [load_of(candidate) / candidate.weight for candidate in candidates]
        return load_of(worker) / worker.weight > sum(loads) / len(loads) + 1

    def facts(self, workers: Iterable[Worker]) -> dict[str, dict[str, int]]:
        """JSON-serializable facts by URL, of workers that have reported anything."""
        pairs = ((worker, self.reports.get(worker)) for worker in workers)
        return {
            worker.url: reports.to_dict()
            for worker, reports in pairs
            if reports is not None and reports.answers
        }

    def forget_worker(self, worker: Worker) -> None:
        self.reports.pop(worker, None)


def learns_from_answers(routing: RoutingConfig) -> bool:
    """Whether a policy of this configuration uses the cached tokens that responses report."""
    pools = routing.disaggregation
    policies = (routing.policy, pools.prefill_policy, pools.decode_policy)
    uses = "cache_aware" in policies or bool(pools.min_uncached_tokens)
    return uses and routing.cache_aware.feedback
