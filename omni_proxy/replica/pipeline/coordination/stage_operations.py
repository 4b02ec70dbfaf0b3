"""Operations on the stages themselves: one at a time, sent to all, their answers put together.

What a stage answers between two of its steps, and what waits beside them for a trainer, need not
wait for its turn: the stage itself refuses what does not fit.

Invariant: every chosen stage is in the aggregate once: with its answer, as skipped (it knows no
such operations), or as failed (it is down, or ended before it answered). An answer that comes after
its operation's timeout is only logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec
import trio

from omni_proxy.replica.pipeline.config import closest_name_hint
from omni_proxy.replica.pipeline.messages import Admin, AdminResult, StageInput
from omni_proxy.replica.pipeline.plan import Plan
from omni_proxy.replica.pipeline.requests import RequestFailed

log = logging.getLogger(__name__)

Aggregate = dict[str, Any]

# Of these one stage at least must have done it; of any other it is enough that none failed.
WEIGHT_ACTIONS = frozenset(
    {
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "prepare_weights_update",
        "complete_weights_update",
        "init_weights_update_group",
        "destroy_weights_update_group",
        "read_weights_ahead",
    }
)
CONCURRENT_ACTIONS = frozenset(
    {
        "model_info",
        "pause_generation",
        "continue_generation",
        "flush_cache",
        "init_weights_update_group",
        "destroy_weights_update_group",
        "prepare_weights_update",
        "complete_weights_update",
        "read_weights_ahead",
    }
)
UNSUPPORTED = "stage does not support admin operations"
NOT_DONE = "admin operation did not complete successfully"


class StageOperations:
    """`send(stage, Admin)` may raise; what it says then is that stage's answer."""

    def __init__(self, send: Callable[[str, StageInput], None]) -> None:
        self._send = send
        self._turn = trio.Lock()
        self._open: dict[str, _Operation] = {}

    @staticmethod
    def chosen(stages: Sequence[str] | None, plan: Plan) -> list[str]:
        """The stages asked for, all of them by default; raises RequestFailed for an unknown one."""
        for name in stages or ():
            if name not in plan.stages:
                hint = closest_name_hint(name, plan.stages)
                raise RequestFailed(f"no stage is named {name}{hint}", 400)
        return sorted(plan.stages if stages is None else dict.fromkeys(stages))

    async def run(
        self, order: Admin, chosen: Sequence[str], ready: Mapping[str, Mapping[str, Any]]
    ) -> Aggregate:
        """Wait for the turn, send, wait for all answers; raises RequestFailed past the timeout."""
        if order.action in CONCURRENT_ACTIONS:
            return await self._run(order, chosen, ready)
        async with self._turn:
            return await self._run(order, chosen, ready)

    async def _run(
        self, order: Admin, chosen: Sequence[str], ready: Mapping[str, Mapping[str, Any]]
    ) -> Aggregate:
        order = msgspec.structs.replace(order, op_id=str(uuid4()))
        operation = self._open[order.op_id] = _Operation(order)
        try:
            for stage in chosen:
                self._ask(operation, stage, ready.get(stage))
            timeout_s = float("inf") if order.timeout_s is None else max(0.0, order.timeout_s)
            with trio.move_on_after(timeout_s) as timing:
                await operation.answered()
        finally:
            del self._open[order.op_id]
        if timing.cancelled_caught:
            late = ", ".join(sorted(operation.missing))
            raise RequestFailed(f"{order.action}: no answer from {late} in {timeout_s:g} s", 504)
        return operation.aggregate()

    def receive(self, result: AdminResult) -> None:
        operation = self._open.get(result.op_id)
        if operation is None:
            log.warning(
                "stage %s answered %s late: %s", result.stage, result.action, result.message
            )
            return
        operation.add(result)

    def stage_ended(self, stage: str, reason: str) -> None:
        for operation in self._open.values():
            if stage in operation.missing:
                operation.fail(stage, f"stage {stage} ended: {reason}")

    def stop(self, reason: str) -> None:
        for operation in self._open.values():
            for stage in sorted(operation.missing):
                operation.fail(stage, reason)

    def _ask(self, operation: _Operation, stage: str, info: Mapping[str, Any] | None) -> None:
        if info is not None and not info.get("supports_admin"):
            operation.skip(stage)
            return
        operation.missing.add(stage)
        try:
            self._send(stage, operation.order)
        except Exception as fault:  # whatever keeps it from the stage is the stage's answer
            operation.fail(stage, str(fault))


class _Operation:
    """One operation's answers, in the order in which they came."""

    def __init__(self, order: Admin) -> None:
        self.order = order
        self.missing: set[str] = set()
        self._results: list[AdminResult] = []
        self._moved = trio.Event()

    def add(self, result: AdminResult) -> None:
        if result.stage in self.missing:
            self.missing.remove(result.stage)
            self._results.append(result)
            self._moved.set()

    def skip(self, stage: str) -> None:
        self._results.append(
            AdminResult(
                self.order.op_id,
                stage,
                self.order.action,
                success=True,
                message=UNSUPPORTED,
                data={"skipped": True, "unsupported": True},
            )
        )

    def fail(self, stage: str, reason: str) -> None:
        order = self.order
        self.add(AdminResult(order.op_id, stage, order.action, False, reason, error=reason))

    async def answered(self) -> None:
        while self.missing:
            self._moved = trio.Event()
            await self._moved.wait()

    def aggregate(self) -> Aggregate:
        done = [result for result in self._results if not result.data.get("skipped")]
        success = all(result.success for result in done)
        if self.order.action in WEIGHT_ACTIONS:
            success = success and bool(done)
        errors = [result.error for result in done if not result.success and result.error]
        return {
            "op_id": self.order.op_id,
            "action": self.order.action,
            "success": success,
            "message": "ok" if success else "; ".join(errors) or NOT_DONE,
            "results": [msgspec.structs.asdict(result) for result in self._results],
        }
