"""Weights over a group: prepared first and completed later, or both in one call (note:two-phase 1).

    prepare: check all, arm ──> (the trainer broadcasts) ──> complete: wait, stage, swap, version

The stage generates between and during these; only the swap halts it. With `buckets`, one completion
applies all of them. With one bucket's names at the top level, each completion applies that bucket,
so the weights may be of two versions until a completion carries a version or a flush: `/model_info`
and every result report it (`weights`, `buckets_applied`). After begin_weight_update, all buckets
are applied together by end_weight_update. If a receive fails, the old weights are unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.replica.pipeline.stage_messages import Admin
from omni_proxy.replica.text.operations import BackgroundStep, PeerError, Steps
from omni_proxy.replica.weights.lifecycle import Lifecycle, StagingSteps, UpdateOptions
from omni_proxy.replica.weights.live_tensors import StagedTensors, WeightsError
from omni_proxy.replica.weights.receive_state import (
    OUT_OF_ORDER_STATUS,
    CallOutOfOrder,
    PreparedUpdateFailed,
)
from omni_proxy.replica.weights.trainer_groups import (
    MAX_DEADLINE_SECS,
    ArmRequest,
    PendingTransfer,
    TrainerGroups,
)
from omni_proxy.shared.engine_protocol import DEFAULT_WEIGHT_GROUP


def group_name(payload: dict[str, Any]) -> str:
    return str(payload.get("group_name") or DEFAULT_WEIGHT_GROUP)


def parse_deadline(payload: dict[str, Any], default_secs: float) -> float:
    """The caller's timeout in seconds; raises GroupError for an invalid one."""
    secs = payload.get("deadline_secs", default_secs)
    if not 0 < secs < float("inf"):
        raise GroupError(f"timeout {secs!r}: it must be a positive number of seconds")
    return float(min(secs, MAX_DEADLINE_SECS))


class TwoPhase:
    """The admin actions of a two-phase update: each public method is one."""

    def __init__(self, lifecycle: Lifecycle, sync: TrainerGroups) -> None:
        self._lifecycle = lifecycle
        self._sync = sync

    def prepare_weights_update(self, order: Admin) -> Steps:
        payload, name = order.payload, group_name(order.payload)
        response: dict[str, Any] = {"group_name": name}
        try:
            terms = self._sync.terms
            ready_secs = min(parse_deadline(payload, terms.ready_secs), terms.ready_secs)
            plans = yield BackgroundStep(partial(self._sync.planned, payload))
            wanted = ArmRequest(name, plans, ready_secs, whole=bool(payload.get("buckets")))
            current = yield from self._sync.arm(wanted, halting=False)
        except (WeightsError, GroupError, PeerError) as error:
            if isinstance(error, CallOutOfOrder):
                return False, str(error), response | {"status_code": error.status}, str(error)
            # A bucket was refused, and the trainer has no call to end the sync.
            self._lifecycle.integrity.broken()
            return False, str(error), response, str(error)
        response |= _size(current)
        message = (
            f"ready for {response['num_tensors']} tensors, {response['num_bytes']} bytes, in "
            f"{response['num_buckets']} buckets"
        )
        return True, message, response, None

    def complete_weights_update(self, order: Admin) -> Steps:
        payload, name = order.payload, group_name(order.payload)
        self._sync.refresh()
        try:
            secs = parse_deadline(payload, self._sync.terms.receive_secs)
            current = self._sync.completing(name)
        except GroupError as refusal:
            status = refusal.status if isinstance(refusal, CallOutOfOrder) else OUT_OF_ORDER_STATUS
            message = str(refusal)
            if isinstance(refusal, PreparedUpdateFailed):  # it failed before this call
                message = self._lifecycle.with_state(message)
            return False, message, {"group_name": name, "status_code": status}, message
        # If this field is missing, don't flush: unlike SGLang, which flushes by default.
        options = UpdateOptions.of(
            payload, pause_on_failure=False, flush_cache=False, whole=current.whole
        )
        staging = self._receive(current, secs, halting=False)
        outcome = yield from self._lifecycle.apply_update(options, staging, {"group_name": name})
        success, message, data, error = outcome
        yield from self._sync.settle(current, kept=success)
        data |= {
            "num_buckets_received": len(current.plans) if success else current.buckets_received
        }
        if success:
            data |= _size(current)
        data |= self._lifecycle.integrity.facts() | {"weight_version": self._lifecycle.version}
        return success, message, data, error

    def update_weights_from_distributed(self, order: Admin) -> Steps:
        """Both phases in one call, while no batch is computed."""
        payload = order.payload
        options = UpdateOptions.of(payload, pause_on_failure=True, whole=False)
        response = {"group_name": group_name(payload), "names": payload.get("names")}
        box: list[PendingTransfer] = []
        outcome = yield from self._lifecycle.update_when_idle(
            options, self._both(payload, box), response
        )
        for current in box:
            yield from self._sync.settle(current, kept=outcome[0])
        return outcome

    def _both(self, payload: dict[str, Any], box: list[PendingTransfer]) -> StagingSteps:
        terms = self._sync.terms
        secs = parse_deadline(payload, terms.receive_secs)
        plans = yield partial(self._sync.planned, payload)
        wanted = ArmRequest(group_name(payload), plans, min(secs, terms.ready_secs))
        current = yield from self._sync.arm(wanted, halting=True)
        box.append(current)
        self._sync.completing(current.transfer.group_name)
        staged = yield from self._receive(current, secs, halting=True)
        return staged

    def _receive(self, current: PendingTransfer, secs: float, *, halting: bool) -> StagingSteps:
        yield from self._sync.await_received(current, secs, halting=halting)
        step = partial(self._sync.stage, current)
        staged: StagedTensors = yield step if halting else BackgroundStep(step)
        return staged


def _size(current: PendingTransfer) -> dict[str, Any]:
    """The size of a transfer, for the result."""
    return {
        "num_buckets": len(current.plans),
        "num_tensors": sum(len(plan.tensors) for plan in current.plans),
        "num_bytes": sum(tensor.nbytes for plan in current.plans for tensor in plan.tensors),
    }
