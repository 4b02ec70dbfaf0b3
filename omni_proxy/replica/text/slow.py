"""Operations that take long: their slow steps run in a thread, the rest in the stage's own.

    begin ──step──> thread ──StepDone──> advance ──step──> ... ──return──> the operation's answer
Invariant: one at a time, but for those registered to run beside; while any lasts nothing is
computed, but every message is heard. What an operation does between its steps nobody sees half
done; what it raises becomes its answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from omni_proxy.replica.pipeline.messages import Admin, AdminResult
from omni_proxy.replica.text.admin import Answer, failure, result_of

log = logging.getLogger(__name__)

# Yields what a thread shall do, is sent what that returned (or raised), returns the answer.
Steps: TypeAlias = Generator[Callable[[], Any], Any, Answer]
SlowFunction: TypeAlias = Callable[[Admin], Steps]


class PeerFault(Exception):
    """A step went well here, but not at another rank of the same model: it must count for none."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """What a step returned or raised; travels through the stage's inbox."""

    op_id: str
    value: Any = None
    error: Exception | None = None


Post: TypeAlias = Callable[[StepDone], None]


@dataclass(frozen=True, slots=True)
class _Operation:
    order: Admin
    steps: Steps
    started_s: float
    beside: bool


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
        """`beside`: it may run while another one does, as what ends that other one must."""
        self._functions[action] = function
        if beside:
            self._beside.add(action)

    @property
    def running(self) -> bool:
        return bool(self._live)

    def begin(self, order: Admin, post: Post) -> AdminResult | None:
        """Start an operation; its answer, where there is one at once.

        A thread calls `post` with what `advance` is to be given.
        """
        beside = order.action in self._beside
        for other in self._live.values():
            if not (beside or other.beside) or other.order.op_id == order.op_id:
                return result_of(order, self._stage, failure(self._busy(other)))
        steps = self._functions[order.action](order)
        operation = _Operation(order, steps, self._clock(), beside)
        self._live[order.op_id] = operation
        return self._drive(operation, lambda: next(steps), post)

    def advance(self, done: StepDone, post: Post) -> AdminResult | None:
        """Go on after a step; the operation's answer, if that was its last."""
        operation = self._live[done.op_id]
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
        self, operation: _Operation, move: Callable[[], Callable[[], Any]], post: Post
    ) -> AdminResult | None:
        order = operation.order
        try:
            step = move()
        except StopIteration as end:
            outcome: Answer = end.value
        except Exception as error:  # an operation may raise anything; the requests must live on
            log.exception("stage %s failed the admin action %s", self._stage, order.action)
            outcome = failure(f"{type(error).__name__}: {error}")
        else:
            name = f"{self._stage}-{order.action}"
            work = threading.Thread(
                target=_work, args=(order.op_id, step, post), name=name, daemon=True
            )
            work.start()
            return None
        del self._live[order.op_id]
        return result_of(order, self._stage, outcome)


def _work(op_id: str, step: Callable[[], Any], post: Post) -> None:
    try:
        done = StepDone(op_id, step())
    except Exception as error:  # raised again inside the operation, which knows what it means
        done = StepDone(op_id, error=error)
    post(done)
