"""What a policy believed of a worker's cache when it sent it a prompt, until the worker has
answered.

Invariant: a prompt counts as unanswered from the pick to the first byte of its response, and no
longer than its request lives: `note_first_byte` may be called several times, and counts once. Only
an answer's own counts are learned from, and only once. Must not keep the request or its text.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from msgspec import Struct

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.prefix_tree import InsertedText

MOST_UNANSWERED: Final = 4096  # per worker; beyond, the oldest ones count as answered
# Of a worker whose last so many answers were as predicted, one in so many is compared.
AGREED: Final = 32
AGREED_SHARE: Final = 16
# Of a worker whose last so many answers reported nothing, one in so many is asked.
SILENT: Final = 32
_NEVER: Final = 1 << 62


class CacheLearner(Protocol):
    """A policy that learns what workers have cached."""

    def learn(self, prediction: CachePrediction, cached: int, prompt: int, sent: int) -> int | None:
        """The worker had `cached` of the prompt's `prompt` tokens, of a request of `sent` bytes.
        How many were predicted; None where this prompt can't be judged."""


class CacheReports:
    """What one worker's answers have said of its cache, and what it still has to answer.

    `backlog`: prompt tokens that are believed to be uncached, of its unanswered prompts. `skips`:
    prompts that are sent without a prediction, until the next one that has one. Where some have
    none, nobody knows which prompts are on their way: nothing is unlearned until all have one again
    and one of these was answered, for engines begin prompts about as they come. `number`, here: of
    the newest prompt.
    """

    __slots__ = (
        "agreed", "answers", "backlog", "corrections", "judged_from", "misses", "period",
        "predicted", "reported", "reuses", "silent", "skips", "unanswered", "unjudged_until",
    )  # fmt: skip

    def __init__(self) -> None:
        self.agreed = 0  # answers since the last one that differed
        self.period = 1  # one in so many prompts has a prediction
        self.skips = 0
        self.judged_from = 0  # an answer to an older prompt unlearns nothing
        self.unjudged_until = 0  # the newest prompt when all began to have one again
        self.backlog = 0
        self.answers = 0  # that reported something
        self.predicted = self.reported = 0  # tokens, summed over them
        self.corrections = 0  # of what it was believed to have
        self.misses = 0  # answers with 0 where more was predicted, until the first one with more
        self.silent = 0  # answers since the last one that reported something
        self.reuses = False  # it has answered with more than 0
        self.unanswered: deque[CachePrediction] = deque()

    def note(self, predicted: int, reported: int) -> None:
        """Prompt tokens of one answer that were believed to be cached, and that were."""
        self.answers += 1
        self.predicted += predicted
        self.reported += reported
        if self.reuses:
            return
        if reported:
            self.reuses, self.misses = True, 0
        elif predicted:
            self.misses += 1

    def note_silence(self) -> None:
        """An answer reported nothing."""
        self.silent += 1
        if self.silent == SILENT + 1:
            self._follow_one_in(SILENT)

    def judge(self, prompt: int, number: int, *, agrees: bool) -> bool:
        """The answer to this prompt is as predicted, or not. Whether it may be learned from."""
        if self.silent:
            if self.silent > SILENT:
                self._follow_all(number)
            self.silent = 0
        if agrees:
            self.agreed += 1
            if self.agreed == AGREED:
                self._follow_one_in(AGREED_SHARE)
        elif self.agreed >= AGREED:
            self._follow_all(number)
        else:
            self.agreed = 0
        if self.period == 1 and self.judged_from == _NEVER and prompt > self.unjudged_until:
            self.judged_from = number + 1
        return prompt >= self.judged_from

    def _follow_one_in(self, period: int) -> None:
        self.period, self.skips, self.judged_from = period, period - 1, _NEVER

    def _follow_all(self, number: int) -> None:
        self.agreed, self.period, self.skips = 0, 1, 0
        self.unjudged_until = number

    def as_facts(self) -> dict[str, int]:
        """JSON-able."""
        return {
            "answers": self.answers,
            "predicted_tokens": self.predicted,
            "reported_tokens": self.reported,
        }

    def oldest_unanswered(self, number: int) -> int:
        """The number of the oldest prompt whose first byte has not come; `number` without any."""
        waiting = self.unanswered
        while waiting and (waiting[0].answered or len(waiting) > MOST_UNANSWERED):
            waiting.popleft()
        return waiting[0].number if waiting else number


class CachePrediction(Struct):
    """Of the `length` bytes of a prompt's text, behind `start` that are no text, the worker is
    believed to have `text.held`; where `text` is None, `held` of its `length` tokens. A length of 0
    can't be judged. `text`: where the prompt is in the tree. `before`: what was used at this number
    or later may have been on its way to the worker when the prompt was sent. `former`: one of
    another policy, for the other leg."""

    learner: CacheLearner
    worker: Worker  # or a rank
    reports: CacheReports
    text: InsertedText | None
    start: int
    length: int
    held: int
    number: int
    uncached: int = 0
    before: int = 0
    answered: bool = False
    former: CachePrediction | None = None


def note_first_byte(prediction: CachePrediction | None) -> None:
    """The response begins, or its request has ended: the prompt is computed, by each worker that it
    was sent to."""
    while prediction is not None:
        if not prediction.answered:
            prediction.answered = True
            reports = prediction.reports
            reports.backlog -= prediction.uncached
            waiting = reports.unanswered
            if waiting and waiting[0] is prediction:
                waiting.popleft()
        prediction = prediction.former


def without_those_of(
    learner: CacheLearner, prediction: CachePrediction | None
) -> CachePrediction | None:
    """The chain without what this policy believed at an earlier attempt, which has ended."""
    if prediction is None:
        return None
    rest = without_those_of(learner, prediction.former)
    if prediction.learner is learner:
        prediction.former = None
        note_first_byte(prediction)
        return rest
    prediction.former = rest
    return prediction
