"""Operations that take long: their slow steps run in a thread, the rest in the stage's own.

    begin ──step──> thread ──StepDone──> advance ──step──> ... ──return──> the operation's answer
Invariant: a step halts the stage unless it is an `BackgroundStep`, and one step at a time does: another one
waits until it is over. Every message is heard meanwhile. What an operation does between its steps
nobody sees half done; what it raises becomes its answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from omni_proxy.replica.pipeline.messages import Admin, AdminResult
from omni_proxy.replica.text.stage_operations import OperationOutcome, failure, to_admin_result

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackgroundStep:
    """A step beside which the stage goes on computing, since it looks at no live tensor."""

    call: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class InterruptibleCall:
    """A step's call that may be told, from any thread and also before it begins, to end soon."""

    call: Callable[[], Any]
    stop: Callable[[str], None]

    def __call__(self) -> Any:
        return self.call()


Step: TypeAlias = Callable[[], Any] | BackgroundStep
# Yields what a thread shall do, is sent what that returned (or raised), returns the answer.
Steps: TypeAlias = Generator[Step, Any, OperationOutcome]
SlowFunction: TypeAlias = Callable[[Admin], Steps]


# In an answer's data: live tensors are of old and new weights (`DamagedFault`).
DAMAGED: Final = "weights_damaged"


class PeerError(Exception):
    """A step went well here, but not at another rank of the same model: it must count for none."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """What a step returned or raised; travels through the stage's inbox."""

    op_id: str
    value: Any = None
    error: Exception | None = None


Post: TypeAlias = Callable[[StepDone], None]


@dataclass(slots=True)
class _Operation:
    """`halting`: its step holds the stage up, until the one after it begins.

    `parked` is a step that would, and waits for another operation's. `call` is the step's.
    """

    order: Admin
    steps: Steps
    started_s: float
    halting: bool = False
    parked: Callable[[], Any] | None = None
    call: Callable[[], Any] | None = None


class SlowOperations:
    """All methods are called in the stage's thread."""

    def __init__(self, stage: str, clock: Callable[[], float]) -> None:
        self._stage = stage
        self._clock = clock
        self._functions: dict[str, SlowFunction] = {}
        self._beside: set[str] = set()
        self._live: dict[str, _Operation] = {}

    def __contains__(self, action: object) -> bool:
        return action in self._functions

    def register(self, action: str, function: SlowFunction, *, beside: bool = False) -> None:
        """`beside`: it may begin while another one halts the stage, as what ends that one must."""
        self._functions[action] = function
        if beside:
            self._beside.add(action)

    @property
    def halting(self) -> bool:
        """Does any step forbid that something is computed?"""
        return any(each.halting for each in self._live.values())

    def halts(self, op_id: str) -> bool:
        """Does this operation's step, or will it as soon as another's is over?"""
        operation = self._live.get(op_id)
        return operation is not None and (operation.halting or operation.parked is not None)

    def interrupt(self, op_id: str, why: str) -> None:
        """Have the operation's present step end soon, where it is one that can; it tells `why`."""
        operation = self._live.get(op_id)
        call = operation.call if operation is not None else None
        if isinstance(call, InterruptibleCall):
            name = f"{self._stage}-interrupt"
            threading.Thread(target=call.stop, args=(why,), name=name, daemon=True).start()

    def begin(self, order: Admin, post: Post) -> AdminResult | None:
        """Start an operation; its answer, where there is one at once.

        A thread calls `post` with what `advance` is to be given.
        """
        beside = order.action in self._beside
        for other in self._live.values():
            if other.order.op_id == order.op_id or (other.halting and not beside):
                return to_admin_result(order, self._stage, failure(self._busy(other)))
        steps = self._functions[order.action](order)
        operation = _Operation(order, steps, self._clock())
        self._live[order.op_id] = operation
        return self._drive(operation, lambda: next(steps), post)

    def advance(self, done: StepDone, post: Post) -> AdminResult | None:
        """Go on after a step; the operation's answer, if that was its last."""
        operation = self._live[done.op_id]
        operation.call = None
        steps, error = operation.steps, done.error
        if error is not None:
            return self._drive(operation, lambda: steps.throw(error), post)
        return self._drive(operation, lambda: steps.send(done.value), post)

    def _busy(self, other: _Operation) -> str:
        seconds = self._clock() - other.started_s
        return (
            f"{other.order.action} is in progress on stage {self._stage} for {seconds:.1f} s: "
            "wait for its answer"
        )

    def _drive(
        self, operation: _Operation, move: Callable[[], Step], post: Post
    ) -> AdminResult | None:
        order = operation.order
        try:
            step = move()
        except StopIteration as end:
            outcome: OperationOutcome = end.value
        except Exception as error:  # an operation may raise anything; the requests must live on
            log.exception("stage %s failed the admin action %s", self._stage, order.action)
            outcome = failure(f"{type(error).__name__}: {error}")
        else:
            self._take_up(operation, step, post)
            return None
        del self._live[order.op_id]
        self._unpark(post)
        return to_admin_result(order, self._stage, outcome)

    def _take_up(self, operation: _Operation, step: Step, post: Post) -> None:
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
        for operation in self._live.values():
            if operation.parked is not None and not self.halting:
                step, operation.parked = operation.parked, None
                operation.halting = True
                self._start(operation, step, post)

    def _start(self, operation: _Operation, step: Callable[[], Any], post: Post) -> None:
        order = operation.order
        name = f"{self._stage}-{order.action}"
        threading.Thread(
            target=_work, args=(order.op_id, step, post), name=name, daemon=True
        ).start()


def _work(op_id: str, step: Callable[[], Any], post: Post) -> None:
    try:
        done = StepDone(op_id, step())
    except Exception as error:  # raised again inside the operation, which knows what it means
        done = StepDone(op_id, error=error)
    post(done)
