"""Operations on the text stage itself: info, pause, continue, flush (api-server.md 2.3, 2.4).

Invariant: they run in the scheduler's thread between two steps, so that none sees a partial batch.
An exception becomes an answer and never ends the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from omni_proxy.replica.pipeline.messages import Admin, AdminResult

if TYPE_CHECKING:
    from omni_proxy.replica.models.kv import SequenceKV
    from omni_proxy.replica.text.batch_queue import BatchQueue
    from omni_proxy.replica.text.model_worker import ModelWorker
    from omni_proxy.replica.text.prefix_cache import PrefixCache

log = logging.getLogger(__name__)

# success, message, data, error
OperationOutcome = tuple[bool, str, dict[str, Any], str | None]
AdminFunction = Callable[[dict[str, Any]], OperationOutcome]

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


class OperableScheduler(Protocol):
    """What the operations of this module need of the scheduler; TextScheduler has it."""

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
    """Run one operation and return its answer."""
    action = operation.action
    function = functions.get(action)
    if function is None:
        outcome = failure(f"stage {stage} does not know the admin action {action!r}")
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
