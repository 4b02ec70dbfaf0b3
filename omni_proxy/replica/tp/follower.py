"""A follower rank in its own process, which repeats the leader's steps and runs its operations.

It is a text stage without requests: steps arrive as messages, its operations are those of a text
stage, and each slow step waits for the leader's verdict on the previous one. The process ends on an
error, and when the leader's socket closes (`pipeline/stage_process.py`), even during a collective
operation.
"""

from __future__ import annotations

import dataclasses
from queue import SimpleQueue
from typing import Any, cast

import msgspec

from omni_proxy.replica.pipeline.stage_messages import (
    Admin,
    AdminResult,
    Emit,
    StageInput,
    StageOutput,
)
from omni_proxy.replica.text.json_schema import CompiledConstraint
from omni_proxy.replica.text.operations import PeerError, StepDone
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.tp.group import (
    ABORT_STEP,
    STEP,
    VERDICT,
    RankLost,
    Vote,
    join_store,
)
from omni_proxy.replica.tp.sharded_model import KVMirror, RankWorker
from omni_proxy.replica.weights.live_tensors import DamagedWeightsError


class FollowerScheduler(TextScheduler):
    """A follower's scheduler; `run` raises any error, after which the leader ends all ranks."""

    worker: RankWorker
    port: int

    def __init__(self, stage_name: str, worker: RankWorker, *bounds: Any) -> None:
        super().__init__(stage_name, worker, *bounds)
        self._mirror = KVMirror(worker.new_kv)
        self._slow_steps: dict[str, _SlowStep] = {}

    def run(self, inbox: SimpleQueue[StageInput], emit: Emit) -> None:
        group = self.worker.group
        group.join(join_store(self.port, group.size))

        def emit_as_follower(message: StageOutput) -> None:
            if isinstance(message, AdminResult):
                self._slow_steps.pop(message.op_id, None)
                rank = self.worker.tp_rank
                emit(msgspec.structs.replace(message, rank=rank, role="follower"))

        self._vote = cast("Any", emit)
        super().run(inbox, emit_as_follower)

    def take(self, message: StageInput | StepDone | CompiledConstraint) -> None:
        match message:
            case Admin(action=action, payload=payload) if action == STEP:
                self._mirror.apply(payload["kv"])
                parts = [(tokens, self._mirror.kv(number)) for number, tokens in payload["parts"]]
                self.worker.model.follow(parts)
            case Admin(op_id, action, payload) if action == VERDICT:
                if op_id in self._slow_steps:
                    self._slow_steps[op_id].verdicts[payload["number"]] = payload["fault"]
                    self._proceed(op_id)
            case Admin(op_id, action, payload) if action == ABORT_STEP:
                slow = self._slow_steps.get(op_id)
                if slow is not None and slow.number + 1 == payload["number"]:
                    self.interrupt(op_id, payload["fault"])
            case Admin():
                self._slow_steps[message.op_id] = _SlowStep()
                super().take(message)
            case StepDone(op_id):
                self._end_step(op_id, message)
            case _:
                super().take(message)
        if self.worker.group.broken:
            raise RankLost(self.worker.group.broken)

    def _end_step(self, op_id: str, done: StepDone) -> None:
        slow = self._slow_steps[op_id]
        slow.number += 1
        slow.done = done
        fault = "" if done.error is None else str(done.error) or type(done.error).__name__
        self._vote(Vote(op_id, slow.number, fault, isinstance(done.error, DamagedWeightsError)))
        self._proceed(op_id)

    def _proceed(self, op_id: str) -> None:
        """Continue an operation whose step is finished here and has the leader's verdict."""
        slow = self._slow_steps[op_id]
        done, fault = slow.done, slow.verdicts.get(slow.number)
        if done is None or fault is None:
            return
        slow.done = None
        if fault and done.error is None:
            done = StepDone(op_id, error=PeerError(fault))
        super().take(done)


@dataclasses.dataclass(slots=True)
class _SlowStep:
    """The progress of one operation at this rank: its step `number`, and the verdicts received."""

    number: int = 0
    done: StepDone | None = None
    verdicts: dict[int, str] = dataclasses.field(default_factory=dict)
