"""A text stage on the tiny model, driven step by step or in a thread."""

import threading
from collections.abc import Sequence
from functools import cache
from queue import SimpleQueue

from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.text_model import ModelWorker, TextModel, load_text_model
from omni_proxy.replica.pipeline.stage_messages import (
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
    """`count` tokens without short repetitions; prompts with different `first` share no prefix."""
    return [260 + (first + 7 * index + index * index) % 252 for index in range(count)]


class WatchedWorker(ModelWorker):
    """Records the number of tokens of each part of each batch; raises `to_raise` once, if set."""

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
        self.emitted = []
        self.scheduler = TextScheduler(
            "decode",
            self.worker,
            BatchLimits(max_running, max_total_tokens, prefill_chunk),
            PrefixCache(cache_entries, 2**26, min_tokens=8),
            clock=self.clock,
        )
        self.scheduler.emit = self.emitted.append

    # Input

    def submit(self, request_id, prompt="The sea", *, task="chat", **params):
        self.scheduler.take(submission(request_id, prompt, task, **params))

    def abort(self, request_id):
        self.scheduler.take(Abort(request_id))

    def admin(self, action, **payload) -> AdminResult:
        self.scheduler.take(Admin("op", action, payload))
        return [message for message in self.emitted if isinstance(message, AdminResult)][-1]

    def step(self, times=1):
        for _ in range(times):
            self.scheduler.step()

    def finish(self):
        while self.scheduler.busy:
            self.scheduler.step()

    # Output

    def emitted_for(self, kind, request_id):
        return [m for m in self.emitted if isinstance(m, kind) and m.request_id == request_id]

    def result(self, request_id) -> dict:
        (result,) = self.emitted_for(Result, request_id)
        assert not self.emitted_for(StageFailure, request_id)
        return result.data

    def failure(self, request_id) -> StageFailure:
        (failure,) = self.emitted_for(StageFailure, request_id)
        assert not self.emitted_for(Result, request_id)
        return failure

    def streamed(self, request_id) -> str:
        return "".join(
            message.chunk["text"] for message in self.emitted_for(ResultChunk, request_id)
        )

    def stats(self) -> dict[str, float]:
        return [message for message in self.emitted if isinstance(message, StageStats)][-1].values


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
    """Runs the loop of a scheduler in a thread, with queues for its input and its output."""

    def __init__(self, scheduler: TextScheduler) -> None:
        self.inbox = SimpleQueue()
        self.outbox = SimpleQueue()
        self._thread = threading.Thread(
            target=scheduler.run, args=(self.inbox, self.outbox.put), daemon=True
        )

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.inbox.put(Shutdown())
        self._thread.join(60)
        assert not self._thread.is_alive()

    def next(self, kind, condition=lambda message: True):
        """The next message of `kind` that meets `condition`; others are skipped."""
        while True:
            message = self.outbox.get(timeout=60)
            if isinstance(message, kind) and condition(message):
                return message
