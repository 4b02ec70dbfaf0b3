"""Admin operations of the text stage (note:api-server 2.3, 2.4), and the runner of slow ones.

    begin ──step──> thread ──StepDone──> advance ──step──> ... ──return──> the operation's result

Invariant: an operation runs in the scheduler's thread between two batches, so it never sees a
partial one; only the long steps of a slow operation run in their own thread. Such a step halts the
stage unless it is a `BackgroundStep`; one halting step runs at a time, others wait for it.
The scheduler handles messages during a step. An exception becomes the operation's result and never
ends the loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, get_args

from omni_proxy.replica.pipeline.stage_messages import Admin, AdminResult

if TYPE_CHECKING:
    from omni_proxy.replica.models.kv import SequenceKV
    from omni_proxy.replica.models.text_model import ModelWorker
    from omni_proxy.replica.text.batch_queue import BatchQueue
    from omni_proxy.replica.text.prefix_cache import PrefixCache


log = logging.getLogger(__name__)

# success, message, data, error
OperationOutcome = tuple[bool, str, dict[str, Any], str | None]
AdminFunction = Callable[[dict[str, Any]], OperationOutcome]

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
# Key in a result's data: live tensors mix old and new weights (`DamagedWeightsError`).
DAMAGED: Final = "weights_damaged"


class OperableScheduler(Protocol):
    """The methods of TextScheduler that the operations of this module use."""

    worker: ModelWorker
    cache: PrefixCache[SequenceKV]
    batch_queue: BatchQueue
    model_path: str
    load_format: str
    weight_version: str
    sync_facts: Callable[[], dict[str, Any]]

    @property
    def halted(self) -> bool: ...
    @property
    def holding(self) -> bool: ...
    def knows(self, action: str) -> bool: ...
    def pause(self, mode: PauseMode) -> int: ...
    def resume(self) -> None: ...


def run_operation(
    operation: Admin, stage: str, functions: Mapping[str, AdminFunction]
) -> AdminResult:
    """Run one operation and return its result."""
    action = operation.action
    function = functions.get(action)
    if function is None:
        outcome = failure(f"stage {stage} has no admin action {action!r}")
    else:
        try:
            outcome = function(operation.payload)
        except Exception as error:  # an operation may raise anything; requests must continue
            log.exception("operation_failed stage=%s action=%s", stage, action)
            outcome = failure(f"{type(error).__name__}: {error}")
    return to_admin_result(operation, stage, outcome)


def to_admin_result(operation: Admin, stage: str, outcome: OperationOutcome) -> AdminResult:
    success, message, data, error_text = outcome
    return AdminResult(
        op_id=operation.op_id,
        stage=stage,
        action=operation.action,
        success=success,
        message=message,
        data=data,
        error=error_text,
        rank=0,
    )


def failure(message: str) -> OperationOutcome:
    return False, message, {}, message


def common_operations(scheduler: OperableScheduler) -> dict[str, AdminFunction]:
    """The operations that every text stage has."""

    def model_info(payload: dict[str, Any]) -> OperationOutcome:
        return True, "ok", _facts(scheduler), None

    def pause_generation(payload: dict[str, Any]) -> OperationOutcome:
        mode = payload.get("mode", "abort")
        if mode not in PAUSE_MODES:
            return failure(f"invalid pause mode: {mode}")
        count = scheduler.pause(mode)
        data = {"mode": mode, "num_paused_requests": count, "engine_paused": True}
        return True, "generation paused", data, None

    def continue_generation(payload: dict[str, Any]) -> OperationOutcome:
        scheduler.resume()
        return True, "generation continued", {"engine_paused": False}, None

    def flush_cache(payload: dict[str, Any]) -> OperationOutcome:
        # Running sequences have their own copies, so a flush never has to be refused.
        dropped = scheduler.cache.flush()
        data = {
            "flush_success": True,
            "flushed_entries": dropped,
            "cache_epoch": scheduler.cache.epoch,
        }
        return True, "cache flushed", data, None

    return {
        "model_info": model_info,
        "pause_generation": pause_generation,
        "continue_generation": continue_generation,
        "flush_cache": flush_cache,
    }


def _facts(scheduler: OperableScheduler) -> dict[str, Any]:
    return {
        "model_path": scheduler.model_path,
        "load_format": scheduler.load_format,
        "weight_version": scheduler.weight_version,
        "weight_sync": scheduler.sync_facts(),
        "dtype": scheduler.worker.dtype,
        "kv_cache_dtype": scheduler.worker.dtype,
        "cache_epoch": scheduler.cache.epoch,
        "disable_radix_cache": not scheduler.cache.enabled,
        "tp_rank": scheduler.worker.tp_rank,
        "tp_size": scheduler.worker.tp_size,
        "model_arch_override": None,
        "supports_weight_update": scheduler.knows("update_weights_from_disk"),
        "supports_weight_checker": scheduler.knows("weights_checker"),
        "prefill_cuda_graph": False,
        "stage_tp_rank": scheduler.worker.tp_rank,
        "stage_tp_size": scheduler.worker.tp_size,
        "engine_paused": scheduler.halted,
        "paused": scheduler.holding,
        "waiting_queue_size": len(scheduler.batch_queue.waiting),
        "running_batch_size": len(scheduler.batch_queue.running),
        # Requests are built on arrival, one by one: there is no pool and no backlog.
        "request_build_workers": 0,
        "request_build_pending": 0,
        "request_build_max_pending": 0,
        "request_build_backlog": 0,
        "request_build_max_pending_observed": 0,
        "request_admission_pending": 0,
    }


@dataclass(frozen=True, slots=True)
class BackgroundStep:
    """A step that touches no live tensor, so the stage continues to compute during it."""

    call: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class InterruptibleCall:
    """A step's call that `stop` can end early, from any thread, also before it begins."""

    call: Callable[[], Any]
    stop: Callable[[str], None]

    def __call__(self) -> Any:
        return self.call()


Step: TypeAlias = Callable[[], Any] | BackgroundStep
# Yields calls for a thread, is sent their results (or errors), returns the outcome.
Steps: TypeAlias = Generator[Step, Any, OperationOutcome]
SlowFunction: TypeAlias = Callable[[Admin], Steps]


class PeerError(Exception):
    """A step succeeded here but failed at another rank of the model, so it must not take effect."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The return value or error of a step, posted to the stage's inbox."""

    op_id: str
    value: Any = None
    error: Exception | None = None


Post: TypeAlias = Callable[[StepDone], None]


@dataclass(slots=True)
class _Operation:
    """A slow operation in progress.

    `halting`: its current step halts the stage. `parked` is a halting step that waits until another
    operation's halting step has ended. `call` is the current step's function.
    """

    order: Admin
    steps: Steps
    started_s: float
    halting: bool = False
    parked: Callable[[], Any] | None = None
    call: Callable[[], Any] | None = None


class SlowOperations:
    """Runs the steps of slow operations. All methods are called in the stage's thread."""

    def __init__(self, stage: str, clock: Callable[[], float]) -> None:
        self._stage = stage
        self._clock = clock
        self._functions: dict[str, SlowFunction] = {}
        self._beside: set[str] = set()
        self._operations: dict[str, _Operation] = {}

    def __contains__(self, action: object) -> bool:
        return action in self._functions

    def register(self, action: str, function: SlowFunction, *, beside: bool = False) -> None:
        """With `beside`, `action` may begin while another operation halts the stage, to end it."""
        self._functions[action] = function
        if beside:
            self._beside.add(action)

    @property
    def halting(self) -> bool:
        """Whether any step halts the stage."""
        return any(operation.halting for operation in self._operations.values())

    def halts(self, op_id: str) -> bool:
        """Whether this operation's step halts the stage, or waits to do so."""
        operation = self._operations.get(op_id)
        return operation is not None and (operation.halting or operation.parked is not None)

    def interrupt(self, op_id: str, why: str) -> None:
        """End the operation's current step soon, if possible, with the error `why`."""
        operation = self._operations.get(op_id)
        call = operation.call if operation is not None else None
        if isinstance(call, InterruptibleCall):
            name = f"{self._stage}-interrupt"
            threading.Thread(target=call.stop, args=(why,), name=name, daemon=True).start()

    def begin(self, order: Admin, post: Post) -> AdminResult | None:
        """Start an operation; returns its result if it ends immediately.

        A thread calls `post` with the argument for `advance`.
        """
        beside = order.action in self._beside
        for other in self._operations.values():
            if other.order.op_id == order.op_id or (other.halting and not beside):
                return to_admin_result(order, self._stage, failure(self._busy_message(other)))
        steps = self._functions[order.action](order)
        operation = _Operation(order, steps, self._clock())
        self._operations[order.op_id] = operation
        return self._resume(operation, lambda: next(steps), post)

    def advance(self, done: StepDone, post: Post) -> AdminResult | None:
        """Continue after a step; returns the operation's result if that was its last step."""
        operation = self._operations[done.op_id]
        operation.call = None
        steps, error = operation.steps, done.error
        if error is not None:
            return self._resume(operation, lambda: steps.throw(error), post)
        return self._resume(operation, lambda: steps.send(done.value), post)

    def _busy_message(self, other: _Operation) -> str:
        seconds = self._clock() - other.started_s
        return (
            f"{other.order.action} is in progress on stage {self._stage} for {seconds:.1f} s: "
            "wait for its result"
        )

    def _resume(
        self, operation: _Operation, continue_steps: Callable[[], Step], post: Post
    ) -> AdminResult | None:
        order = operation.order
        try:
            step = continue_steps()
        except StopIteration as stop:
            outcome: OperationOutcome = stop.value
        except Exception as error:  # an operation may raise anything; requests must continue
            log.exception("operation_failed stage=%s action=%s", self._stage, order.action)
            outcome = failure(f"{type(error).__name__}: {error}")
        else:
            self._run_step(operation, step, post)
            return None
        del self._operations[order.op_id]
        self._unpark(post)
        return to_admin_result(order, self._stage, outcome)

    def _run_step(self, operation: _Operation, step: Step, post: Post) -> None:
        operation.halting = False
        operation.call = step.call if isinstance(step, BackgroundStep) else step
        if isinstance(step, BackgroundStep):
            self._start(operation, step.call, post)
            self._unpark(post)
        elif self.halting:
            operation.parked = step
        else:
            operation.halting = True
            self._start(operation, step, post)

    def _unpark(self, post: Post) -> None:
        for operation in self._operations.values():
            if operation.parked is not None and not self.halting:
                step, operation.parked = operation.parked, None
                operation.halting = True
                self._start(operation, step, post)

    def _start(self, operation: _Operation, step: Callable[[], Any], post: Post) -> None:
        order = operation.order
        name = f"{self._stage}-{order.action}"
        threading.Thread(
            target=_run_in_thread, args=(order.op_id, step, post), name=name, daemon=True
        ).start()


def _run_in_thread(op_id: str, step: Callable[[], Any], post: Post) -> None:
    try:
        done = StepDone(op_id, step())
    except Exception as error:  # raised again inside the operation, which handles it
        done = StepDone(op_id, error=error)
    post(done)


class WaitingScheduler(Protocol):
    """The methods of TextScheduler that `pause_when_idle` uses."""

    def await_idle(self) -> threading.Event: ...
    def pause(self, mode: PauseMode) -> int: ...
    @property
    def holding(self) -> bool: ...


def pause_when_idle(scheduler: WaitingScheduler, order: Admin) -> Steps:
    """Pause when every current request has ended; later requests wait from now on."""
    idle = scheduler.await_idle()
    yield BackgroundStep(InterruptibleCall(lambda: idle.wait(), lambda why: idle.set()))
    if not scheduler.holding:
        return failure("generation was continued before all requests had ended")
    scheduler.pause("in_place")
    return True, "generation paused", {"engine_paused": True}, None
