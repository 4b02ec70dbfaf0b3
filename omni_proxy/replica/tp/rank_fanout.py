"""An operation of the leader at all ranks: sent to all, run in lockstep, with one result.

    begin ──refused by rank 0──> its result only
      └──> sent to all ──> (step done by all ──> verdict to all) * ──> results of all ──> merged
                                 └──one failed──> ranks still in that step may abort it

Invariant: no rank begins a slow step before every rank has finished the previous one. If a step
failed at one rank, all ranks get that verdict, so an operation that stages first and then applies
does so at all ranks or at none. No batch is computed while a step that halts may still run at any
rank, nor after a step that left a follower's weights damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from omni_proxy.replica.pipeline.stage_messages import Admin, AdminResult
from omni_proxy.replica.text.operations import DAMAGED, PeerError, StepDone
from omni_proxy.replica.tp.group import FollowerMessage, StepOverdue, Vote, abort_step, verdict

COLLECT_SECS = 60.0  # for the followers' part, if the operation sets no limit
NOT_COLLECTED = "failed to collect TP follower admin results"

log = logging.getLogger(__name__)


class FanOutLeader(Protocol):
    """The leader's methods that operations use; all are called in its thread."""

    def send_all(self, message: Admin) -> None:
        """Send to all followers."""

    def schedule(self, message: StepOverdue, after_secs: float) -> Callable[[], None]:
        """Delivers `message` after `after_secs`, unless the returned function cancels it."""

    def advance(self, done: StepDone) -> None:
        """Continues rank 0's operation; its result may be reported before this returns."""

    def interrupt(self, op_id: str, why: str) -> None:
        """Ends rank 0's current step soon, if possible."""

    def halts(self, op_id: str) -> bool:
        """Whether rank 0 is in a step of the operation during which no batch may be computed."""

    def damaged(self) -> None:
        """A follower's weights are damaged: no batch may be computed with them."""

    def send_result(self, result: AdminResult) -> None:
        """Sends the stage's single result."""


@dataclass(slots=True)
class _Operation:
    """The progress of one operation.

    `number` counts rank 0's slow steps, `decided` those whose verdict was sent. `announced` means
    that the followers have the operation. `aborted` is the last step that all ranks had to abort,
    `done` the step that waits for its verdict. `halting` is whether rank 0's last step halts: a
    follower may still be in it when rank 0 has ended.
    """

    order: Admin
    announced: bool = False
    late: bool = False
    halting: bool = True
    result_sent: bool = False
    number: int = 0
    decided: int = 0
    aborted: int = 0
    done: StepDone | None = None
    own: AdminResult | None = None
    cancel_timer: Callable[[], None] = lambda: None
    votes: dict[int, Vote] = field(default_factory=dict)
    results: dict[int, AdminResult] = field(default_factory=dict)


class RankFanOut:
    """The operations that have not ended at every rank, by `op_id`."""

    def __init__(self, leading: FanOutLeader, ranks: Iterable[int]) -> None:
        self._leading = leading
        self._ranks = sorted(ranks)
        self._live: dict[str, _Operation] = {}

    @property
    def halting(self) -> bool:
        """Whether any follower runs a step during which no batch may be computed."""
        return any(operation.announced and operation.halting for operation in self._live.values())

    def run(self, order: Admin, begin: Callable[[], None]) -> None:
        """Starts the operation at rank 0, then at the others unless rank 0 has refused it."""
        operation = self._live[order.op_id] = _Operation(order)
        begin()
        self._note_halt(operation)
        if operation.own is None or operation.own.success:
            operation.announced = True
            self._leading.send_all(order)
        self._proceed(operation)

    def own_step(self, done: StepDone) -> None:
        """Rank 0 has finished a slow step."""
        operation = self._live[done.op_id]
        operation.done = done
        operation.number += 1
        self._proceed(operation)

    def own_result(self, result: AdminResult) -> None:
        """Rank 0 has ended its part, or refused it."""
        operation = self._live.get(result.op_id)
        if operation is None:
            self._leading.send_result(result)
            return
        operation.own = result
        operation.number += 1

    def receive(self, rank: int, message: FollowerMessage) -> None:
        """A follower has finished a slow step or ended its part; other messages are ignored."""
        if not isinstance(message, Vote | AdminResult):
            return
        operation = self._live.get(message.op_id)
        if operation is None:
            log.warning(
                "tp_message_ignored rank=%d op_id=%s was=tp_answer_ignored", rank, message.op_id
            )
            return
        if _damaged(message):
            self._leading.damaged()
        if isinstance(message, AdminResult):
            operation.results[rank] = message
        elif message.number > operation.decided:
            operation.votes[rank] = message
        self._proceed(operation)

    def overdue(self, message: StepOverdue) -> None:
        operation = self._live.get(message.op_id)
        if operation is not None and operation.number == message.number:
            operation.late = True
            self._proceed(operation)

    def _proceed(self, operation: _Operation) -> None:
        """Handles what has arrived, and sets a deadline for what is missing."""
        self._abort_step(operation)
        if operation.done is not None:
            self._decide(operation, operation.done)
        if operation.own is not None:
            self._finish(operation, operation.own)
        operation.cancel_timer()
        waits = operation.done is not None or operation.own is not None
        if waits and not operation.result_sent and not operation.late:
            limit = operation.order.timeout_s
            operation.cancel_timer = self._leading.schedule(
                StepOverdue(operation.order.op_id, operation.number),
                COLLECT_SECS if limit is None else max(0.0, limit),
            )

    def _abort_step(self, operation: _Operation) -> None:
        """Aborts the current step at all ranks if it failed at one."""
        number = operation.decided + 1
        if not operation.announced or operation.own is not None or operation.aborted == number:
            return
        if fault := _fault_of(operation, number):
            operation.aborted = number
            self._leading.send_all(abort_step(operation.order.op_id, number, fault))
            if operation.done is None:
                self._leading.interrupt(operation.order.op_id, fault)

    def _decide(self, operation: _Operation, done: StepDone) -> None:
        """Sends the verdict once every rank has finished the step, or the deadline has passed."""
        number = operation.number
        voted = {rank for rank, vote in operation.votes.items() if vote.number >= number}
        missing = [r for r in self._ranks if r not in operation.results and r not in voted]
        if missing and not operation.late:
            return
        fault = _fault_of(operation, number, missing)
        operation.done, operation.decided = None, number
        operation.votes = {r: vote for r, vote in operation.votes.items() if vote.number > number}
        self._leading.send_all(verdict(operation.order.op_id, number, fault))
        if fault and done.error is None:
            done = StepDone(done.op_id, error=PeerError(fault))
        self._leading.advance(done)
        self._note_halt(operation)

    def _note_halt(self, operation: _Operation) -> None:
        if operation.own is None:
            operation.halting = self._leading.halts(operation.order.op_id)

    def _finish(self, operation: _Operation, own: AdminResult) -> None:
        """Answers once all other ranks have ended, too, or are overdue."""
        for vote in operation.votes.values():
            # A follower with more steps than rank 0 would otherwise wait forever for a verdict.
            fault = "" if own.success else f"rank 0: {own.error or own.message}"
            self._leading.send_all(verdict(own.op_id, vote.number, fault))
            operation.decided = max(operation.decided, vote.number)
        operation.votes.clear()
        missing = (
            [r for r in self._ranks if r not in operation.results] if operation.announced else []
        )
        if not operation.result_sent and (operation.late or not missing):
            operation.result_sent = True
            results = [operation.results[rank] for rank in sorted(operation.results)]
            self._leading.send_result(merged(own, results, 1 + len(self._ranks), missing))
        if not missing:
            self._live.pop(own.op_id, None)


def _fault_of(operation: _Operation, number: int, missing: Iterable[int] = ()) -> str:
    """The errors of the step at all ranks; "" if there are none."""
    missing, done = list(missing), operation.done
    faults = [] if done is None or done.error is None else [f"rank 0: {done.error}"]
    faults += (
        f"rank {rank}: {vote.fault}"
        for rank, vote in operation.votes.items()
        if vote.fault and vote.number >= number
    )
    faults += (_describe(result) for result in operation.results.values() if not result.success)
    if missing:
        faults.append(f"{NOT_COLLECTED}: {_named(missing)}")
    return "; ".join(faults)


def _damaged(message: Vote | AdminResult) -> bool:
    return message.damaged if isinstance(message, Vote) else bool(message.data.get(DAMAGED))


def _describe(result: AdminResult) -> str:
    return f"rank {result.rank}: {result.error or result.message}"


def merged(
    own: AdminResult, others: list[AdminResult], size: int, missing: list[int]
) -> AdminResult:
    """The stage's result (2.2): rank 0's, with the complete results of all ranks.

    It is a success only if every rank's result is one.
    """
    local = msgspec.structs.replace(own, rank=0, role="leader")
    ranked = [local, *others]
    failed = [result for result in ranked if not result.success]
    message, error = own.message, own.error
    if own.success and missing:
        message, error = NOT_COLLECTED, f"{NOT_COLLECTED}: {_named(missing)}"
    elif own.success and failed:
        message = error = "; ".join(map(_describe, failed))
    merged = {
        "tp_size": size,
        "rank_results": [msgspec.structs.asdict(result) for result in ranked],
    }
    damaged = [result for result in ranked if _damaged(result)]
    if damaged:  # rank 0's own weights are intact
        message = error = "; ".join(map(_describe, damaged))
        merged |= {DAMAGED: True, "engine_paused": True}
    return msgspec.structs.replace(
        local,
        success=not failed and not missing,
        message=message,
        data=own.data | merged,
        error=error,
    )


def _named(ranks: list[int]) -> str:
    return f"no reply from {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
