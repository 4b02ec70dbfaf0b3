"""Predictions of what a worker has cached of a prompt, from the pick until the response reports it.

Invariant: a prompt counts as unanswered from the pick to the first byte of its response, or to the
end of its request: repeated calls of `note_first_byte` have no effect. Each response is used once.
Must not keep a reference to the request or its text.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from msgspec import Struct

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.prefix_tree import InsertedText

MAX_UNANSWERED: Final = 4096  # per worker; above it, the oldest ones count as answered
# After AGREED responses of a worker in a row were as predicted, one in AGREED_SHARE is compared.
AGREED: Final = 32
AGREED_SHARE: Final = 16
# After this many responses of a worker in a row reported nothing, one in as many is followed.
SILENT: Final = 32
_NEVER: Final = 1 << 62


class CacheLearner(Protocol):
    """A policy that uses reports of what workers have cached."""

    def learn(self, prediction: CachePrediction, cached: int, prompt: int, sent: int) -> int | None:
        """The worker had `cached` of the prompt's `prompt` tokens cached; the request had `sent`
        bytes. Returns the predicted tokens, or None if the prompt can't be compared."""


class CacheReports:
    """Cache reports in one worker's responses, and its unanswered prompts.

    `backlog`: predicted uncached tokens of its unanswered prompts. `skips`: number of prompts that
    are sent without a prediction before the next one with a prediction. While prompts are skipped,
    it is unknown which ones are in flight, so nothing is corrected until all prompts have a
    prediction again and one of these was answered: engines start prompts about in order of arrival.
    `number`: sequence number of the newest prompt.
    """

    __slots__ = (
        "agreed", "answers", "backlog", "corrections", "corrections_from", "misses", "period",
        "predicted", "reported", "resumed_at", "reuses", "silent", "skips", "unanswered",
    )  # fmt: skip

    def __init__(self) -> None:
        self.agreed = 0  # responses as predicted since the last that differed
        self.period = 1  # one in `period` prompts has a prediction
        self.skips = 0
        self.corrections_from = 0  # responses to older prompts cause no correction
        self.resumed_at = 0  # the newest prompt when predictions for all prompts resumed
        self.backlog = 0
        self.answers = 0  # responses that reported cached tokens
        self.predicted = self.reported = 0  # tokens, summed over these responses
        self.corrections = 0
        self.misses = 0  # reports of 0 where more was predicted, until the first report above 0
        self.silent = 0  # responses without a report since the last one with a report
        self.reuses = False  # a response reported more than 0
        self.unanswered: deque[CachePrediction] = deque()

    def note(self, predicted: int, reported: int) -> None:
        """Add the predicted and the reported cached tokens of one response."""
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
        """A response reported no cached tokens."""
        self.silent += 1
        if self.silent == SILENT + 1:
            self._sample_one_in(SILENT)

    def record_agreement(self, prompt: int, number: int, *, agrees: bool) -> bool:
        """The response to this prompt agrees with its prediction, or not. Returns whether it may be
        used for a correction."""
        if self.silent:
            if self.silent > SILENT:
                self._compare_all(number)
            self.silent = 0
        if agrees:
            self.agreed += 1
            if self.agreed == AGREED:
                self._sample_one_in(AGREED_SHARE)
        elif self.agreed >= AGREED:
            self._compare_all(number)
        else:
            self.agreed = 0
        if self.period == 1 and self.corrections_from == _NEVER and prompt > self.resumed_at:
            self.corrections_from = number + 1
        return prompt >= self.corrections_from

    def _sample_one_in(self, period: int) -> None:
        self.period, self.skips, self.corrections_from = period, period - 1, _NEVER

    def _compare_all(self, number: int) -> None:
        self.agreed, self.period, self.skips = 0, 1, 0
        self.resumed_at = number

    def to_dict(self) -> dict[str, int]:
        """JSON-serializable."""
        return {
            "answers": self.answers,
            "predicted_tokens": self.predicted,
            "reported_tokens": self.reported,
        }

    def oldest_pending(self, number: int) -> int:
        """Number of the oldest prompt without a first response byte; without any, `number`."""
        waiting = self.unanswered
        while waiting and (waiting[0].answered or len(waiting) > MAX_UNANSWERED):
            waiting.popleft()
        return waiting[0].number if waiting else number


class CachePrediction(Struct):
    """What the worker is predicted to have cached of a prompt.

    With `text`, its position in the tree: the prompt's text has `length` bytes after `start` other
    bytes, and `text.held` bytes are cached. Without it: `cached_tokens` of `length` tokens. With a
    length of 0 the prediction can't be compared. `before`: texts used at this number or later may
    have been in flight when the prompt was sent. `former`: prediction of another policy, for the
    other leg.
    """

    learner: CacheLearner
    worker: Worker  # or a rank
    reports: CacheReports
    text: InsertedText | None
    start: int
    length: int
    cached_tokens: int
    number: int
    uncached: int = 0
    before: int = 0
    answered: bool = False
    former: CachePrediction | None = None


def note_first_byte(prediction: CachePrediction | None) -> None:
    """The response has begun or its request has ended: the prompt is no longer backlog of any
    worker that it was sent to."""
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
    """The chain without this policy's predictions of an earlier attempt, which has ended."""
    if prediction is None:
        return None
    rest = without_those_of(learner, prediction.former)
    if prediction.learner is learner:
        prediction.former = None
        note_first_byte(prediction)
        return rest
    prediction.former = rest
    return prediction
