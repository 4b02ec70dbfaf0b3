"""The loop of the text stage: take messages, compute one batch, tell what came of it, again.

Invariant: everything happens in the thread that calls `run`. Requests join and leave between two
batches only; after an abort nothing more is told of a request. A batch that cannot be computed
fails its own requests and no others. While paused, or with nothing to do, the loop blocks.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.pipeline.messages import (
    Abort,
    Admin,
    AdminResult,
    Emit,
    Result,
    ResultChunk,
    Shutdown,
    StageFailure,
    StageInput,
    StageOutput,
    StagePayload,
    StageStats,
    Submit,
)
from omni_proxy.replica.pipeline.stage import Record, ignore_event
from omni_proxy.replica.text.batch_queue import BatchLimits, BatchQueue, SchedulerMetrics
from omni_proxy.replica.text.constraint import ConstraintFactory
from omni_proxy.replica.text.constraint_compiler import CompiledConstraint, ConstraintCompiler
from omni_proxy.replica.text.model_worker import ModelWorker
from omni_proxy.replica.text.prefix_cache import PrefixCache
from omni_proxy.replica.text.prompt import Prompt, PromptError, PromptLimits, parse_prompt
from omni_proxy.replica.text.sampling import SamplingError
from omni_proxy.replica.text.sequence import Sequence, usage
from omni_proxy.replica.text.slow_operations import SlowFunction, SlowOperations, StepDone
from omni_proxy.replica.text.stage_operations import (
    AdminFunction,
    PauseMode,
    common_operations,
    run_operation,
)

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.5
DROPPED = "The request was dropped by an admin action."


def discard_output(message: StageOutput) -> None:
    """Stands where `run` puts the stage's way out."""


class TextScheduler:
    """Computes many requests at once (`Scheduler` of pipeline/stage.py).

    Operations registered with `register_admin` run between two steps and may use every public
    attribute; those of `register_slow_admin` too, save in the steps they yield. `record` is called
    at the scheduler's events of api-server.md 4.2, `at_end` when `run` ends; `sync_facts` tells
    how new weights come; `weights_damaged` is to be called where a part elsewhere is damaged.
    """

    supports_admin = True

    def __init__(
        self,
        stage_name: str,
        worker: ModelWorker,
        limits: BatchLimits,
        cache: PrefixCache[SequenceKV],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self.cache = cache
        self.batch_queue = BatchQueue(limits)
        self.model_path = worker.text.name
        self.load_format = "auto"
        self.weight_version = "default"
        self.paused = False
        self.pause_mode: PauseMode | None = None
        self.record: Record = ignore_event
        self.emit: Emit = discard_output
        self._stage = stage_name
        self._limits = limits
        self._fit = PromptLimits(
            stage_name, min(worker.context, limits.max_total_tokens), worker.vocabulary
        )
        self._embeds: deque[Prompt] = deque()
        self._compiling = ConstraintCompiler(stage_name, ConstraintFactory(worker.tokenizer))
        self._clock = clock
        self._meters = SchedulerMetrics(told_s=clock())
        self.admin_actions: dict[str, AdminFunction] = common_operations(self)
        self._slow = SlowOperations(stage_name, clock)
        self._post: Callable[[StepDone | CompiledConstraint], None] = queue.SimpleQueue[Any]().put
        self.sync_facts: Callable[[], dict[str, Any]] = dict
        self.weights_damaged: Callable[[], None] = lambda: None
        self.at_end: list[Callable[[], None]] = []
        self.info = {
            "model": worker.text.name,
            "context": self._fit.max_tokens,
            "max_running": limits.max_running,
            "max_total_tokens": limits.max_total_tokens,
            "vocabulary": worker.vocabulary,
            "json_schemas": True,
        }

    def run(self, inbox: queue.SimpleQueue[StageInput], emit: Emit) -> None:
        """Serve until Shutdown; what is held then gets no answer."""
        self.emit = emit
        # In a queue of the stage's messages these are the only ones that are its own.
        self._post = cast("Callable[[StepDone | CompiledConstraint], None]", inbox.put)
        try:
            while self._drain(inbox):
                self.step()
        finally:
            for close in self.at_end:
                close()

    def register_admin(self, action: str, function: AdminFunction) -> None:
        """Answer `action` with `function(payload)`, run in this thread between two steps."""
        self.admin_actions[action] = function

    def register_slow_admin(
        self, action: str, function: SlowFunction, *, beside: bool = False
    ) -> None:
        """Answer `action` with `function(order)`, whose steps run in a thread (`slow.py`).

        While a step halts, nothing is computed and another operation is refused, unless that one
        may begin `beside` others.
        """
        self._slow.register(action, function, beside=beside)

    def halts(self, op_id: str) -> bool:
        """Does that slow operation forbid that anything is computed now?"""
        return self._slow.halts(op_id)

    def interrupt(self, op_id: str, why: str) -> None:
        """Have that slow operation's present step end soon, where it can."""
        self._slow.interrupt(op_id, why)

    def knows(self, action: str) -> bool:
        return action in self.admin_actions or action in self._slow

    # What comes in

    def _drain(self, inbox: queue.SimpleQueue[StageInput]) -> bool:
        """Take all that has come; where nothing can be computed, wait for more. False: the end."""
        while True:
            try:
                message = inbox.get_nowait()
            except queue.Empty:
                if self.busy:
                    return True
                message = self._wait(inbox)
            if isinstance(message, Shutdown):
                return False
            self.take(message)

    def _wait(self, inbox: queue.SimpleQueue[StageInput]) -> StageInput:
        self.tell_stats()
        try:
            return inbox.get(timeout=STATS_INTERVAL_S)
        except queue.Empty:
            self.tell_stats()  # the throughput is down to 0 by now
            return inbox.get()
        finally:
            self._meters.told_s = self._clock()  # the wait counts for no rate

    @property
    def busy(self) -> bool:
        """Is there something that a step would compute?"""
        return not self.halted and bool(self._embeds or len(self.batch_queue))

    @property
    def halted(self) -> bool:
        """Does a pause, or an operation that goes on, forbid every step?"""
        return self.paused or self._slow.halting

    def take(self, message: StageInput | StepDone | CompiledConstraint) -> None:
        """Act on one message between two steps; one that is not for a text stage is ignored."""
        match message:
            case Submit(payload):
                self._submit(payload)
            case Abort(request_id):
                self._meters.aborted += self._forget(request_id)
            case Admin(action=action) if action in self._slow:
                self._tell_end(self._slow.begin(message, self._post))
            case Admin():
                self.emit(run_operation(message, self._stage, self.admin_actions))
            case StepDone():
                self._take_done(message)
            case CompiledConstraint():
                self._constrained(message)
            case _:
                pass

    def _take_done(self, done: StepDone) -> None:
        self._tell_end(self._slow.advance(done, self._post))

    def _tell_end(self, result: AdminResult | None) -> None:
        if result is not None:
            self.emit(result)

    def _submit(self, payload: StagePayload) -> None:
        request_id = payload.request_id
        self.record("scheduler_request_build_start", request_id, {})
        try:
            if request_id in self.active_ids():
                raise PromptError(f"Request {request_id} already exists")
            self._enqueue(parse_prompt(payload, self._fit, self._clock()))
        except PromptError as fault:
            self.emit(StageFailure(request_id, self._stage, str(fault), fault.kind))
            return
        except Exception as error:  # no request may end the loop that all others live on
            log.exception("stage %s could not take a request", self._stage)
            self._fail(request_id, error)

    def _enqueue(self, prompt: Prompt) -> None:
        if prompt.sampling.json_schema:
            self._compiling.begin(prompt, self._post)
            return
        if prompt.embedded:
            self._embeds.append(prompt)
        else:
            self.batch_queue.waiting.append(Sequence(prompt, self.worker.tokenizer))
        self._built(prompt.request_id)

    def _constrained(self, done: CompiledConstraint) -> None:
        """The constraint of a request is there: it waits for its turn from now on."""
        prompt, made = done.prompt, self._compiling.take(done)
        if isinstance(made, Exception):
            self._fail(prompt.request_id, made)
        elif made is not None:
            self.batch_queue.waiting.append(Sequence(prompt, self.worker.tokenizer, made))
            self._built(prompt.request_id)

    def _built(self, request_id: str) -> None:
        self.record("scheduler_request_build_end", request_id, {})
        self.record("scheduler_queue_enter", request_id, {"waiting": len(self.batch_queue.waiting)})

    def active_ids(self) -> list[str]:
        """Ids of all requests that have had no answer yet."""
        sequences = [sequence.request_id for sequence in self.batch_queue]
        return sequences + [prompt.request_id for prompt in self._embeds] + self._compiling.ids

    def _forget(self, request_id: str) -> int:
        sequence = self.batch_queue.find(request_id)
        if sequence is not None:
            self.batch_queue.remove(sequence)
            return 1
        before = len(self._embeds)
        self._embeds = deque(each for each in self._embeds if each.request_id != request_id)
        return before - len(self._embeds) + self._compiling.forget(request_id)

    # What an operation may do

    def pause(self, mode: PauseMode) -> int:
        """Compute nothing until `resume`; return how many requests were dropped or retracted."""
        self.paused, self.pause_mode = True, mode
        match mode:
            case "abort":
                return self.drop_all()
            case "retract":
                return self.batch_queue.retract()
            case "in_place":
                return 0

    def resume(self) -> None:
        self.paused, self.pause_mode = False, None

    def drop_all(self) -> int:
        """End every request as dropped; return how many there were."""
        dropped = self.active_ids()
        self.batch_queue.clear()
        self._embeds.clear()
        self._compiling.clear()
        self._meters.aborted += len(dropped)
        for request_id in dropped:
            self.emit(StageFailure(request_id, self._stage, DROPPED, "dropped"))
        return len(dropped)

    # What is computed

    def step(self) -> None:
        """Compute one embedding and one batch, if there are any and no pause forbids it."""
        if self.halted:
            return
        if self._embeds:
            self._embed(self._embeds.popleft())
        for sequence in self.batch_queue.admit():
            with self._failing([sequence]):
                self._begin(sequence)
        batch = self.batch_queue.batch()
        if batch:
            self._compute(batch)
        if self._clock() - self._meters.told_s >= STATS_INTERVAL_S:
            self.tell_stats()

    @contextmanager
    def _failing(self, sequences: Iterable[Sequence]) -> Iterator[None]:
        """What is raised inside ends these sequences, where they still run, and nothing else."""
        try:
            yield
        except Exception as error:  # a model may raise anything; the loop must live on
            if not isinstance(error, SamplingError):
                log.exception("stage %s failed a batch", self._stage)
            for sequence in sequences:
                if sequence in self.batch_queue.running:
                    self.batch_queue.remove(sequence)
                    self._fail(sequence.request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        if isinstance(error, SamplingError):  # what was asked for cannot be
            self.emit(StageFailure(request_id, self._stage, str(error), "caller"))
            return
        self.emit(
            StageFailure(request_id, self._stage, f"{type(error).__name__}: {error}", "server")
        )

    def _embed(self, prompt: Prompt) -> None:
        tokens = prompt.token_ids
        try:
            vector = self.worker.embed(tokens)
        except Exception as error:  # as in a batch
            log.exception("stage %s failed an embedding", self._stage)
            self._fail(prompt.request_id, error)
            return
        self._meters.prompt_tokens += len(tokens)
        data = {
            "embedding": vector,
            "usage": usage(len(tokens)),
            "weight_version": self.weight_version,
            "engine_time_s": self._clock() - prompt.arrived_s,
            "finish_reason": "stop",
        }
        self.emit(Result(prompt.request_id, self._stage, data))

    def _begin(self, sequence: Sequence) -> None:
        """Give an admitted sequence its KV, with whatever is known of its tokens."""
        lent = self.cache.lend(sequence.tokens)
        sequence.begin(lent or self.worker.new_kv(), self.cache.epoch)
        if sequence.begun == 1:
            sequence.cached_tokens = sequence.computed
            self._meters.prompt_tokens += len(sequence.prompt.token_ids)
            self._meters.cached_tokens += sequence.cached_tokens
            facts = {"cached_tokens": sequence.cached_tokens}
            self.record("scheduler_prefill_start", sequence.request_id, facts)

    def _compute(self, batch: list[tuple[Sequence, int]]) -> None:
        with self._failing(sequence for sequence, _ in batch):
            logits = self.worker.forward([each.part(count) for each, count in batch])
            for (sequence, _), row in zip(batch, logits, strict=True):
                if sequence.pending == 0:
                    with self._failing([sequence]):
                        self._advance(sequence, row)

    def _advance(self, sequence: Sequence, logits: Tensor) -> None:
        if not logits.isfinite().all():
            raise ArithmeticError("the model's logits are not finite: its weights are damaged")
        request_id = sequence.request_id
        if sequence.completion_tokens == 0:
            self.record("scheduler_prefill_end", request_id, {})
        text = sequence.advance(logits)
        self._meters.generation_tokens += 1
        if sequence.completion_tokens == 1:
            self.record("scheduler_first_emit", request_id, {})
        if text and sequence.prompt.streamed:
            number = sequence.chunks_sent
            self.emit(ResultChunk(request_id, self._stage, sequence.chunk(text), number))
        if sequence.finish_reason is not None:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.batch_queue.remove(sequence)
        if sequence.kv is not None:
            self.cache.keep(sequence.tokens[: sequence.computed], sequence.kv, sequence.epoch)
        data = sequence.result(self.weight_version, self._clock())
        self.emit(Result(sequence.request_id, self._stage, data))

    def tell_stats(self) -> None:
        values = self._meters.gauges(self.batch_queue, self._limits.max_total_tokens)
        values["num_waiting_reqs"] += len(self._embeds) + len(self._compiling)
        values["gen_throughput"] = self._meters.throughput(self._clock())
        values["paused"] = float(self.paused)
        self.emit(StageStats(self._stage, values))
