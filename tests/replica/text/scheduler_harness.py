"""A text stage on the tiny model, driven step by step or in a thread, and its messages."""

import threading
from collections.abc import Sequence
from functools import cache
from queue import SimpleQueue

from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.text_model import ModelWorker, TextModel, load_text_model
from omni_proxy.replica.pipeline.messages import (
    Abort,
    Admin,
    AdminResult,
    OmniRequest,
    Result,
    ResultChunk,
    Shutdown,
    StageFailure,
    StagePayload,
    StageStats,
    Submit,
)
from omni_proxy.replica.text.batch_queue import BatchLimits
from omni_proxy.replica.text.prefix_cache import PrefixCache
from omni_proxy.replica.text.scheduler import TextScheduler


@cache
def tiny() -> TextModel:
    return load_text_model("tiny")


def tokens_of(text: str) -> list[int]:
    return tiny().tokenizer.encode(text)


def long_prompt(count: int, first: int = 0) -> list[int]:
    """`count` tokens that do not repeat soon; different `first` share no prefix."""
    return [260 + (first + 7 * place + place * place) % 252 for place in range(count)]


class WatchedWorker(ModelWorker):
    """Counts the tokens of each part of each batch; raises a given error once."""

    def __init__(self, text: TextModel) -> None:
        super().__init__(text)
        self.batches: list[list[int]] = []
        self.to_raise: Exception | None = None

    def forward(self, parts: Sequence[tuple[Sequence[int], SequenceKV]]):
        if self.to_raise is not None:
            error, self.to_raise = self.to_raise, None
            raise error
        self.batches.append([len(tokens) for tokens, _ in parts])
        return super().forward(parts)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SchedulerHarness:
    def __init__(
        self, *, max_running=16, max_total_tokens=16_384, prefill_chunk=64, cache_entries=0
    ):
        self.worker = WatchedWorker(tiny())
        self.clock = Clock()
        self.reported = []
        self.scheduler = TextScheduler(
            "decode",
            self.worker,
            BatchLimits(max_running, max_total_tokens, prefill_chunk),
            PrefixCache(cache_entries, 2**26, min_tokens=8),
            clock=self.clock,
        )
        self.scheduler.emit = self.reported.append

    # In

    def submit(self, request_id, prompt="The sea", *, task="chat", **params):
        self.scheduler.take(submission(request_id, prompt, task, **params))

    def abort(self, request_id):
        self.scheduler.take(Abort(request_id))

    def admin(self, action, **payload) -> AdminResult:
        self.scheduler.take(Admin("op", action, payload))
        return [each for each in self.reported if isinstance(each, AdminResult)][-1]

    def step(self, times=1):
        for _ in range(times):
            self.scheduler.step()

    def finish(self):
        while self.scheduler.busy:
            self.scheduler.step()

    # Out

    def of(self, kind, request_id):
        return [e for e in self.reported if isinstance(e, kind) and e.request_id == request_id]

    def result(self, request_id) -> dict:
        (result,) = self.of(Result, request_id)
        assert not self.of(StageFailure, request_id)
        return result.data

    def failure(self, request_id) -> StageFailure:
        (failure,) = self.of(StageFailure, request_id)
        assert not self.of(Result, request_id)
        return failure

    def streamed(self, request_id) -> str:
        return "".join(each.chunk["text"] for each in self.of(ResultChunk, request_id))

    def stats(self) -> dict[str, float]:
        return [each for each in self.reported if isinstance(each, StageStats)][-1].values


def submission(request_id, prompt="The sea", task="chat", **params) -> Submit:
    token_ids = tokens_of(prompt) if isinstance(prompt, str) else prompt
    request = OmniRequest(prompt, params, {"task": task})
    return Submit(StagePayload(request_id, request, {"token_ids": token_ids}), "prepare")


def undisturbed(prompt="The sea", **params) -> dict:
    """The result of a request that runs alone on a stage without a cache."""
    harness = SchedulerHarness()
    harness.submit("alone", prompt, **params)
    harness.finish()
    return harness.result("alone")


class Loop:
    """The scheduler's own loop in a thread, with its messages in a queue."""

    def __init__(self, scheduler: TextScheduler) -> None:
        self.inbox = SimpleQueue()
        self.reported = SimpleQueue()
        self._thread = threading.Thread(
            target=scheduler.run, args=(self.inbox, self.reported.put), daemon=True
        )

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.inbox.put(Shutdown())
        self._thread.join(60)
        assert not self._thread.is_alive()

    def next(self, kind, holds=lambda message: True):
        """The next message of `kind` for which `holds`; others are passed over."""
        while True:
            message = self.reported.get(timeout=60)
            if isinstance(message, kind) and holds(message):
                return message
