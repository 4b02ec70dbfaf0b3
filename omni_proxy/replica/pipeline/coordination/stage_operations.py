"""Admin operations: sent to the stages, one operation at a time, with their results aggregated.

Operations in CONCURRENT_ACTIONS do not wait for others: the stage refuses those that conflict.
Invariant: every selected stage is in the aggregate once: with its result, as skipped (it supports
no operations), or as failed (it is down, or ended before it replied). A result after the
operation's timeout is only logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec
import trio

from omni_proxy.replica.pipeline.config import Plan, closest_name_hint
from omni_proxy.replica.pipeline.requests import RequestFailed
from omni_proxy.replica.pipeline.stage_messages import Admin, AdminResult, StageInput

log = logging.getLogger(__name__)

Aggregate = dict[str, Any]

# These succeed only if at least one stage ran them; all others if no stage failed.
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
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
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
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "update_weights",
        "pause_when_idle",
        "release_kv",
    }
)
UNSUPPORTED = "stage does not support admin operations"
NOT_DONE = "admin operation did not complete successfully"


class StageOperations:
    """Sends operations with `send(stage, Admin)`; if it raises, that is the stage's result."""

    def __init__(self, send: Callable[[str, StageInput], None]) -> None:
        self._send = send
        self._lock = trio.Lock()
        self._pending: dict[str, _Operation] = {}

    @staticmethod
    def select_stages(stages: Sequence[str] | None, plan: Plan) -> list[str]:
        """Return the given stages, by default all; raises RequestFailed for an unknown one."""
        for name in stages or ():
            if name not in plan.stages:
                hint = closest_name_hint(name, plan.stages)
                raise RequestFailed(f"no stage is named {name}{hint}", 400)
        return sorted(plan.stages if stages is None else dict.fromkeys(stages))

    async def run(
        self, order: Admin, chosen: Sequence[str], ready: Mapping[str, Mapping[str, Any]]
    ) -> Aggregate:
        """Wait for earlier operations, send, wait for all results; raises RequestFailed on
        timeout."""
        if order.action in CONCURRENT_ACTIONS:
            return await self._run(order, chosen, ready)
        async with self._lock:
            return await self._run(order, chosen, ready)

    async def _run(
        self, order: Admin, chosen: Sequence[str], ready: Mapping[str, Mapping[str, Any]]
    ) -> Aggregate:
        order = msgspec.structs.replace(order, op_id=str(uuid4()))
        operation = self._pending[order.op_id] = _Operation(order)
        try:
            for stage in chosen:
                self._send_to(operation, stage, ready.get(stage))
            timeout_s = float("inf") if order.timeout_s is None else max(0.0, order.timeout_s)
            with trio.move_on_after(timeout_s) as timing:
                await operation.wait_for_results()
        finally:
            del self._pending[order.op_id]
        if timing.cancelled_caught:
            late = ", ".join(sorted(operation.missing))
            raise RequestFailed(f"{order.action}: no reply from {late} in {timeout_s:g} s", 504)
        return operation.aggregate()

    def receive(self, result: AdminResult) -> None:
        operation = self._pending.get(result.op_id)
        if operation is None:
            log.warning(
                "operation_result_late stage=%s action=%s message=%s was=operation_answer_late",
                result.stage,
                result.action,
                result.message,
            )
            return
        operation.add(result)

    def stage_ended(self, stage: str, reason: str) -> None:
        for operation in self._pending.values():
            if stage in operation.missing:
                operation.fail(stage, f"stage {stage} ended: {reason}")

    def stop(self, reason: str) -> None:
        for operation in self._pending.values():
            for stage in sorted(operation.missing):
                operation.fail(stage, reason)

    def _send_to(self, operation: _Operation, stage: str, info: Mapping[str, Any] | None) -> None:
        if info is not None and not info.get("supports_admin"):
            operation.skip(stage)
            return
        operation.missing.add(stage)
        try:
            self._send(stage, operation.order)
        except Exception as error:  # a send error counts as the stage's result
            operation.fail(stage, str(error))


class _Operation:
    """The results of one operation, in order of arrival."""

    def __init__(self, order: Admin) -> None:
        self.order = order
        self.missing: set[str] = set()
        self._results: list[AdminResult] = []
        self._changed = trio.Event()

    def add(self, result: AdminResult) -> None:
        if result.stage in self.missing:
            self.missing.remove(result.stage)
            self._results.append(result)
            self._changed.set()

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

    async def wait_for_results(self) -> None:
        while self.missing:
            self._changed = trio.Event()
            await self._changed.wait()

    def aggregate(self) -> Aggregate:
        supported_results = [result for result in self._results if not result.data.get("skipped")]
        success = all(result.success for result in supported_results)
        if self.order.action in WEIGHT_ACTIONS:
            success = success and bool(supported_results)
        errors = [
            result.error for result in supported_results if not result.success and result.error
        ]
        return {
            "op_id": self.order.op_id,
            "action": self.order.action,
            "success": success,
            "message": "ok" if success else "; ".join(errors) or NOT_DONE,
            "results": [msgspec.structs.asdict(result) for result in self._results],
        }
