"""The loop of the text stage: handle messages, compute one batch, report its results, repeat.

Invariant: all work is done in the thread that calls `run`. Requests join and leave only between two
batches; after an abort nothing more is emitted for the request. A batch that cannot be computed
fails only its own requests. While paused or idle, the loop blocks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor

from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.text_model import ModelWorker
from omni_proxy.replica.pipeline.stage import Record, ignore_event
from omni_proxy.replica.pipeline.stage_messages import (
    Abort,
    Admin,
    AdminResult,
    Emit,
    EndEarly,
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
from omni_proxy.replica.text.batch_queue import BatchLimits, BatchQueue, SchedulerMetrics
from omni_proxy.replica.text.json_schema import (
    CompiledConstraint,
    ConstraintCompiler,
    ConstraintFactory,
)
from omni_proxy.replica.text.operations import (
    AdminFunction,
    PauseMode,
    SlowFunction,
    SlowOperations,
    StepDone,
    common_operations,
    pause_when_idle,
    run_operation,
)
from omni_proxy.replica.text.prefix_cache import PrefixCache
from omni_proxy.replica.text.prompt import Prompt, PromptError, PromptLimits, parse_prompt
from omni_proxy.replica.text.sampling import SamplingError
from omni_proxy.replica.text.sequence import Sequence, usage

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.5
DROPPED = "The request was dropped by an admin action."


def discard_output(message: StageOutput) -> None:
    """The default of `emit`, until `run` sets the real one."""


class TextScheduler:
    """Computes many requests together (`Scheduler` of pipeline/stage.py).

    Operations registered with `register_admin` run between two steps and may use every public
    attribute; those of `register_slow_admin` too, except in the steps they yield. `record` is
    called for the scheduler's events of note:api-server 4.2, each of `at_end` when `run` ends;
    `sync_facts` returns how new weights arrive; `weights_damaged` is called when another part of
    the model is damaged.
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
        self._weight_version = "default"
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
        self._idle: threading.Event | None = None  # set when all earlier requests have ended
        self._held: list[Prompt] = []  # requests received since `_idle` was created
        self._compiling = ConstraintCompiler(stage_name, ConstraintFactory(worker.tokenizer))
        self._clock = clock
        self._metrics = SchedulerMetrics(reported_s=clock())
        self.admin_actions: dict[str, AdminFunction] = common_operations(self)
        self._slow = SlowOperations(stage_name, clock)
        self._slow.register("pause_when_idle", partial(pause_when_idle, self), beside=True)
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
            "ends_early": True,
        }

    @property
    def weight_version(self) -> str:
        return self._weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        for sequence in self.batch_queue:
            sequence.end_version(self._weight_version)
        self._weight_version = version

    def run(self, inbox: queue.SimpleQueue[StageInput], emit: Emit) -> None:
        """Serve until Shutdown; requests that are still held get no result."""
        self.emit = emit
        # The stage posts these two to itself; the inbox's type has only the pipeline's messages.
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
        """Answer `action` with `function(order)`, whose steps run in a thread (`operations.py`).

        While a step halts the stage, nothing is computed and other operations are refused, except
        those registered with `beside`.
        """
        self._slow.register(action, function, beside=beside)

    def halts(self, op_id: str) -> bool:
        """Whether the slow operation `op_id` halts the stage, or waits to do so."""
        return self._slow.halts(op_id)

    def interrupt(self, op_id: str, why: str) -> None:
        """End the current step of the slow operation `op_id` soon, if possible."""
        self._slow.interrupt(op_id, why)

    def knows(self, action: str) -> bool:
        return action in self.admin_actions or action in self._slow

    # Messages

    def _drain(self, inbox: queue.SimpleQueue[StageInput]) -> bool:
        """Handle all messages; if nothing can be computed, wait for more. False on Shutdown."""
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
        self._note_idle()
        self.emit_stats()
        try:
            return inbox.get(timeout=STATS_INTERVAL_S)
        except queue.Empty:
            self.emit_stats()  # the throughput is 0 by now
            return inbox.get()
        finally:
            self._metrics.reported_s = self._clock()  # the wait is not part of any rate

    @property
    def busy(self) -> bool:
        """Whether a step would compute anything."""
        return not self.halted and bool(self._embeds or len(self.batch_queue))

    @property
    def halted(self) -> bool:
        """Whether a pause or a slow operation forbids steps."""
        return self.paused or self._slow.halting

    def take(self, message: StageInput | StepDone | CompiledConstraint) -> None:
        """Handle one message between two steps; other messages are ignored."""
        match message:
            case Submit(payload):
                self._submit(payload)
            case Abort(request_id):
                self._metrics.aborted += self._forget(request_id)
            case EndEarly(request_id):
                self._end_early(request_id)
            case Admin(action=action) if action in self._slow:
                self._emit_result(self._slow.begin(message, self._post))
            case Admin():
                self.emit(run_operation(message, self._stage, self.admin_actions))
            case StepDone():
                self._on_step_done(message)
            case CompiledConstraint():
                self._on_constraint(message)
            case _:
                pass

    def _on_step_done(self, done: StepDone) -> None:
        self._emit_result(self._slow.advance(done, self._post))

    def _emit_result(self, result: AdminResult | None) -> None:
        if result is not None:
            self.emit(result)

    def _submit(self, payload: StagePayload) -> None:
        request_id = payload.request_id
        self.record("scheduler_request_build_start", request_id, {})
        try:
            if request_id in self.active_ids():
                raise PromptError(f"Request {request_id} already exists")
            self._enqueue(parse_prompt(payload, self._fit, self._clock()))
        except PromptError as error:
            self.emit(StageFailure(request_id, self._stage, str(error), error.kind))
            return
        except Exception as error:  # no request may end the loop
            log.exception("request_rejected stage=%s", self._stage)
            self._fail(request_id, error)

    def _enqueue(self, prompt: Prompt) -> None:
        if self._idle is not None:
            self._held.append(prompt)
            return
        if prompt.sampling.json_schema:
            self._compiling.begin(prompt, self._post)
            return
        if prompt.embedded:
            self._embeds.append(prompt)
        else:
            self.batch_queue.waiting.append(Sequence(prompt, self.worker.tokenizer))
        self._record_queued(prompt.request_id)

    def _on_constraint(self, done: CompiledConstraint) -> None:
        """The constraint of a request is compiled: the request joins the queue."""
        prompt, result = done.prompt, self._compiling.take(done)
        if isinstance(result, Exception):
            self._fail(prompt.request_id, result)
        elif result is not None:
            self.batch_queue.waiting.append(Sequence(prompt, self.worker.tokenizer, result))
            self._record_queued(prompt.request_id)

    def _record_queued(self, request_id: str) -> None:
        self.record("scheduler_request_build_end", request_id, {})
        self.record("scheduler_queue_enter", request_id, {"waiting": len(self.batch_queue.waiting)})

    def active_ids(self) -> list[str]:
        """Ids of all requests that have no result yet."""
        sequences = [sequence.request_id for sequence in self.batch_queue]
        prompts = [*self._embeds, *self._held]
        return sequences + [prompt.request_id for prompt in prompts] + self._compiling.ids

    def _forget(self, request_id: str) -> int:
        sequence = self.batch_queue.find(request_id)
        if sequence is not None:
            self.batch_queue.remove(sequence)
            return 1
        before = len(self._embeds) + len(self._held)
        self._embeds = deque(prompt for prompt in self._embeds if prompt.request_id != request_id)
        self._held = [prompt for prompt in self._held if prompt.request_id != request_id]
        dropped = before - len(self._embeds) - len(self._held)
        return dropped + self._compiling.forget(request_id)

    def _end_early(self, request_id: str) -> None:
        """Answer a request with its partial output, possibly empty; an embedding is dropped."""
        sequence = self.batch_queue.find(request_id)
        if sequence is not None:
            self._metrics.aborted += 1
            sequence.end_early()
            self._finish(sequence)
            return
        for prompt in self._unbegun():
            if prompt.request_id == request_id and not prompt.embedded:
                self._metrics.aborted += self._forget(request_id)
                unbegun = Sequence(prompt, self.worker.tokenizer)
                unbegun.end_early()
                data = unbegun.result(self.weight_version, self._clock())
                self.emit(Result(request_id, self._stage, data))
                return
        if self._forget(request_id):
            self._metrics.aborted += 1
            self.emit(StageFailure(request_id, self._stage, DROPPED, "dropped"))

    def _unbegun(self) -> list[Prompt]:
        """Requests that have not joined the queue yet."""
        return [*self._held, *self._compiling.prompts]

    # Used by operations

    def weights_changed(self) -> None:
        """Flush the prefix cache; the caller must end or retract the running sequences."""
        self.cache.flush()

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
        self._end_wait()

    def await_idle(self) -> threading.Event:
        """Hold new requests until `resume`; the event is set once all others have ended.

        Earlier requests are computed to their end even if the scheduler was paused.
        """
        self.paused, self.pause_mode = False, None
        if self._idle is None:
            self._idle = threading.Event()
        self._note_idle()
        return self._idle

    @property
    def holding(self) -> bool:
        """Whether new requests wait for `resume`."""
        return self.paused or self._idle is not None

    def _note_idle(self) -> None:
        if self._idle is not None and len(self.active_ids()) == len(self._held):
            self._idle.set()

    def _end_wait(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.set()
        prompts, self._held = self._held, []
        for prompt in prompts:
            self._enqueue(prompt)

    def drop_all(self) -> int:
        """Fail every request as dropped; return how many there were."""
        dropped = self.active_ids()
        self.batch_queue.clear()
        self._embeds.clear()
        self._held.clear()
        self._compiling.clear()
        self._metrics.aborted += len(dropped)
        for request_id in dropped:
            self.emit(StageFailure(request_id, self._stage, DROPPED, "dropped"))
        return len(dropped)

    # Computation

    def step(self) -> None:
        """Compute one embedding and one batch, if there are any and the stage is not halted."""
        if self.halted:
            return
        if self._embeds:
            self._embed(self._embeds.popleft())
        for sequence in self.batch_queue.admit():
            with self._catch_errors([sequence]):
                self._start(sequence)
        batch = self.batch_queue.batch()
        if batch:
            self._compute(batch)
        if self._clock() - self._metrics.reported_s >= STATS_INTERVAL_S:
            self.emit_stats()

    @contextmanager
    def _catch_errors(self, sequences: Iterable[Sequence]) -> Iterator[None]:
        """If an exception is raised inside, fail those of these sequences that still run."""
        try:
            yield
        except Exception as error:  # a model may raise anything; the loop must continue
            if not isinstance(error, SamplingError):
                log.exception("batch_failed stage=%s", self._stage)
            for sequence in sequences:
                if sequence in self.batch_queue.running:
                    self.batch_queue.remove(sequence)
                    self._fail(sequence.request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        if isinstance(error, SamplingError):  # invalid parameters of the request
            self.emit(StageFailure(request_id, self._stage, str(error), "caller"))
            return
        self.emit(
            StageFailure(request_id, self._stage, f"{type(error).__name__}: {error}", "server")
        )

    def _embed(self, prompt: Prompt) -> None:
        tokens = prompt.token_ids
        try:
            vector = self.worker.embed(tokens)
        except Exception as error:  # a model may raise anything; the loop must continue
            log.exception("embedding_failed stage=%s", self._stage)
            self._fail(prompt.request_id, error)
            return
        self._metrics.prompt_tokens += len(tokens)
        data = {
            "embedding": vector,
            "usage": usage(len(tokens)),
            "weight_version": self.weight_version,
            "engine_time_s": self._clock() - prompt.arrived_s,
            "finish_reason": "stop",
        }
        self.emit(Result(prompt.request_id, self._stage, data))

    def _start(self, sequence: Sequence) -> None:
        """Give an admitted sequence its KV, with the cached prefix if there is one."""
        cached = self.cache.copy_longest_prefix(sequence.tokens)
        sequence.begin(cached or self.worker.new_kv(), self.cache.epoch)
        if sequence.begun == 1:
            sequence.cached_tokens = sequence.computed
            self._metrics.prompt_tokens += len(sequence.prompt.token_ids)
            self._metrics.cached_tokens += sequence.cached_tokens
            facts = {"cached_tokens": sequence.cached_tokens}
            self.record("scheduler_prefill_start", sequence.request_id, facts)

    def _compute(self, batch: list[tuple[Sequence, int]]) -> None:
        with self._catch_errors(sequence for sequence, _ in batch):
            logits = self.worker.forward([sequence.part(count) for sequence, count in batch])
            for (sequence, _), row in zip(batch, logits, strict=True):
                if sequence.pending == 0:
                    with self._catch_errors([sequence]):
                        self._advance(sequence, row)

    def _advance(self, sequence: Sequence, logits: Tensor) -> None:
        if not logits.isfinite().all():
            raise ArithmeticError("the model's logits are not finite: its weights are damaged")
        request_id = sequence.request_id
        if sequence.completion_tokens == 0:
            self.record("scheduler_prefill_end", request_id, {})
        text = sequence.advance(logits)
        self._metrics.generation_tokens += 1
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
            self.cache.store(sequence.tokens[: sequence.computed], sequence.kv, sequence.epoch)
        self._emit_sequence_result(sequence, sequence.result(self.weight_version, self._clock()))

    def _emit_sequence_result(self, sequence: Sequence, data: dict[str, Any]) -> None:
        """Report the result of a sequence that has ended."""
        self.emit(Result(sequence.request_id, self._stage, data))

    def emit_stats(self) -> None:
        values = self._metrics.gauges(self.batch_queue, self._limits.max_total_tokens)
        values["num_waiting_reqs"] += len(self._embeds) + len(self._compiling) + len(self._held)
        values["gen_throughput"] = self._metrics.throughput(self._clock())
        values["paused"] = float(self.paused)
        self.emit(StageStats(self._stage, values))
