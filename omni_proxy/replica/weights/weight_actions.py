"""The admin actions on weights of a text stage (note:api-server 2.4, 3, 9.1).

Invariant: reading, receiving, copying and hashing run in an operation's own thread. An invalid
request is refused before a group or a weight is touched. Between the preparation of an update and
its end, only actions that end it are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from omni_proxy.process_group.rendezvous import Rendezvous
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.replica.pipeline.stage_messages import Admin
from omni_proxy.replica.text.operations import (
    BackgroundStep,
    OperationOutcome,
    PeerError,
    SlowFunction,
    Steps,
    failure,
)
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.weights.checker import WeightsChecker
from omni_proxy.replica.weights.lifecycle import Lifecycle, UpdateOptions, stage_in_background
from omni_proxy.replica.weights.live_tensors import LiveTensors, StagedTensors, WeightsError
from omni_proxy.replica.weights.receive_state import CallOutOfOrder
from omni_proxy.replica.weights.stored_tensors import stage_serialized
from omni_proxy.replica.weights.trainer_groups import (
    DEFAULT_RECEIVE_SETTINGS,
    ReceiveSettings,
    TrainerGroups,
)
from omni_proxy.replica.weights.two_phase import TwoPhase, group_name, parse_deadline
from omni_proxy.replica.weights.weight_transfer import WeightTransfer
from omni_proxy.replica.weights.weights_folder import WeightsFolder

SELECTORS = ("all", "target")
ROWS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class ModelRank:
    """The part of a tensor-parallel model that a stage's process holds."""

    rank: int = 0
    size: int = 1

    @property
    def layout(self) -> dict[str, int]:
        return {"tp_size": self.size, "rank": self.rank}


class WeightActions:
    """Registers its actions with `scheduler`; only files below `weights_root` are read.

    `load_first` loads the initial model again, for a `model_path` that is its name.
    """

    def __init__(
        self,
        scheduler: TextScheduler,
        *,
        weights_root: str = "/",
        rank: ModelRank = ModelRank(),
        terms: ReceiveSettings = DEFAULT_RECEIVE_SETTINGS,
        load_first: Callable[[], nn.Module] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._load_first, self._first_name = load_first, scheduler.model_path
        self._rank = rank
        self._target = LiveTensors(scheduler.worker.text.model)
        self._folder = WeightsFolder(weights_root)
        self._checker = WeightsChecker(self._target, rank.layout, scheduler.worker.whole_tensors)
        self._lifecycle = Lifecycle(scheduler, self._target)
        self._sync = TrainerGroups(f"weights-rank-{rank.rank}", self._target, terms, size=rank.size)
        # If a bucket is lost, the version of the buckets before it stays incomplete.
        self._sync.receive_state.on_lost = self._lifecycle.integrity.broken
        self._two_phase = TwoPhase(self._lifecycle, self._sync)
        self._transfer = WeightTransfer(self._lifecycle, self._sync, self._target, rank.rank)
        scheduler.weights_damaged = self._lifecycle.damaged
        self._register()

    def _register(self) -> None:
        scheduler = self._scheduler
        one_by_one: tuple[SlowFunction, ...] = (
            self.update_weights_from_disk,
            self.update_weights_from_tensor,
            self._two_phase.update_weights_from_distributed,
            self.begin_weight_update,
            self.end_weight_update,
            self.update_weight_version,
            self.get_weights_by_name,
            self.weights_checker,
            self._transfer.start_weight_update,
            self._transfer.finish_weight_update,
            self._transfer.reset_weights,
        )
        for function in one_by_one:
            scheduler.register_slow_admin(function.__name__, function)
        # Actions that only wait may begin at any time, and so may those that end a stuck receive.
        beside: tuple[SlowFunction, ...] = (
            self.init_weights_update_group,
            self.destroy_weights_update_group,
            self._two_phase.prepare_weights_update,
            self._two_phase.complete_weights_update,
            self.read_weights_ahead,
            self._transfer.init_weight_transfer_engine,
            self._transfer.shutdown_weight_transfer_engine,
            self._transfer.update_weights,
        )
        for function in beside:
            scheduler.register_slow_admin(function.__name__, function, beside=True)
        scheduler.sync_facts = self._facts
        scheduler.at_end.append(self._sync.close)
        resume = scheduler.admin_actions["continue_generation"]

        def continue_generation(payload: dict[str, Any]) -> OperationOutcome:
            # Continuing with weights of two versions abandons the rest of the sync.
            self._lifecycle.integrity.broken()
            return resume(payload)

        scheduler.register_admin("continue_generation", continue_generation)

    def _facts(self) -> dict[str, Any]:
        open_update = self._lifecycle.open_update
        tensors = None if open_update is None else len(open_update.staged)
        return (
            self._sync.facts()
            | self._lifecycle.integrity.facts()
            | {
                "open_update_tensors": tensors,
                "session_tensors": tensors,  # the old name, for one release
            }
        )

    # Updates

    def update_weights_from_disk(self, order: Admin) -> Steps:
        payload, scheduler = order.payload, self._scheduler
        if (refusal := self._busy()) is not None:
            return refusal
        options = UpdateOptions.of(payload, pause_on_failure=False)
        staging = stage_in_background(partial(self._stage, payload))
        # For calls in vLLM's format, running requests are recomputed.
        beside = payload.get("beside_requests", False)
        update = self._lifecycle.apply_update if beside else self._lifecycle.update_when_idle
        outcome = yield from update(options, staging, {}, into_open_update=False)
        success, message, data, error = outcome
        if success:
            message = "Succeeded to update model weights."
            scheduler.model_path = payload["model_path"]
            scheduler.load_format = payload.get("load_format") or scheduler.load_format
            # The whole model was replaced: discard tensors gathered for the previous one.
            yield from self._lifecycle.discard_update()
        response = {
            "model_path": payload.get("model_path"),
            "weight_version": scheduler.weight_version,
            "token_step": payload.get("token_step", 0),
        }
        return success, message, data | response, error

    def _stage(self, payload: dict[str, Any]) -> StagedTensors:
        """Raises WeightsError."""
        is_first_model = (
            payload.get("model_path") == self._first_name and payload.get("manifest") is None
        )
        if self._load_first is None or not is_first_model:
            return self._folder.stage(payload, self._target)
        staged = StagedTensors(self._target)
        for name, tensor in LiveTensors(self._load_first()):
            staged.add(name, tensor)
        return staged

    def read_weights_ahead(self, order: Admin) -> Steps:
        """Prefetch the part of a file that is already final, for a later update from disk."""
        try:
            nbytes = yield BackgroundStep(
                partial(self._folder.prefetch, order.payload, self._target)
            )
        except (WeightsError, PeerError) as error:
            return failure(str(error))
        return True, "ok", {"ahead_bytes": nbytes}, None

    def update_weights_from_tensor(self, order: Admin) -> Steps:
        if (refusal := self._busy()) is not None:
            return refusal
        options = UpdateOptions.of(order.payload, pause_on_failure=True, whole=False)
        rank = self._rank
        staging = stage_in_background(
            partial(stage_serialized, order.payload, self._target, rank.rank, rank.size)
        )
        outcome = yield from self._lifecycle.update_when_idle(
            options, staging, {"metadata_only": False}
        )
        return outcome

    def _busy(self) -> OperationOutcome | None:
        """The refusal of actions between an update's preparation and its end."""
        self._sync.refresh()
        try:
            self._sync.receive_state.require_free()
        except CallOutOfOrder as error:
            return False, str(error), {"status_code": error.status}, str(error)
        return None

    # Groups

    def init_weights_update_group(self, order: Admin) -> Steps:
        payload, name = order.payload, group_name(order.payload)
        response = {
            "group_name": name,
            "world_size": payload.get("world_size"),
            "rank_offset": payload.get("rank_offset", 0),
        }
        try:
            rendezvous = Rendezvous(
                master_address=payload.get("master_address", ""),
                master_port=payload.get("master_port", 0),
                rank=_whole(payload, "rank_offset", 0, 2**20, 0) + self._rank.rank,
                world_size=payload.get("world_size", 0),
                group_name=name,
                backend=payload.get("backend") or _default_backend(),
                timeout_s=parse_deadline(payload, self._sync.terms.join_secs),
                device=self._rank.rank,
            )
            yield from self._sync.join(rendezvous)
        except (WeightsError, GroupError, PeerError) as error:
            message = f"Failed to initialize custom process group: {error}"
            status = {"status_code": error.status} if isinstance(error, CallOutOfOrder) else {}
            return False, message, response | status, message
        # A new group begins a new sync: the trainer won't end an older one.
        self._lifecycle.integrity.broken()
        yield from self._lifecycle.discard_update()
        return True, "Succeeded to initialize custom process group.", response, None

    def destroy_weights_update_group(self, order: Admin) -> Steps:
        name = group_name(order.payload)
        try:
            yield from self._sync.leave(name)
        except GroupError as error:
            return False, str(error), {"group_name": name}, str(error)
        self._lifecycle.integrity.left()
        message = "Succeeded to destroy custom process group."
        return True, message, {"group_name": name}, None

    # A sync in parts

    def begin_weight_update(self, order: Admin) -> Steps:
        selector = order.payload.get("selector", "all")
        yield from ()
        if selector not in SELECTORS:
            return failure(f"there is no {selector!r} model here: selector must be all or target")
        if self._lifecycle.open_update is not None:
            return failure(  # SGLang's text
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._lifecycle.begin_update()
        return True, "Succeeded to begin weight update.", {"selector": selector}, None

    def end_weight_update(self, order: Admin) -> Steps:
        if (refusal := self._busy()) is not None:
            return refusal
        outcome = yield from self._lifecycle.end_update()
        return outcome

    def update_weight_version(self, order: Admin) -> Steps:
        version = order.payload.get("new_version")
        yield from ()
        if not isinstance(version, str) or not version:
            return failure("new_version must be a non-empty string")
        dropped = 0
        if order.payload.get("abort_all_requests", True):
            dropped = self._scheduler.drop_all()
        self._lifecycle.name_version(version)
        data = {"new_version": version, "num_paused_requests": dropped}
        return True, f"Weight version updated to {version}.", data, None

    # Status

    def get_weights_by_name(self, order: Admin) -> Steps:
        name = order.payload.get("name")
        try:
            rows = _whole(order.payload, "truncate_size", 0, 2**40, ROWS_SHOWN)
            own = self._target.own_name(name if isinstance(name, str) else "")
        except WeightsError as error:
            return failure(str(error))
        values = yield partial(self._rows, own, rows)
        return True, "ok", {"name": name, "parameter": values}, None

    def _rows(self, name: str, count: int) -> list[Any]:
        """The first rows of the whole tensor; at ranks other than the first, of the rank's part."""
        tensor = self._target.live(name)
        whole = self._scheduler.worker.whole(name, tensor)
        values = tensor if whole is None else whole
        rows: list[Any] = values[:count].detach().float().cpu().tolist()
        return rows

    def weights_checker(self, order: Admin) -> Steps:
        action = str(order.payload.get("action", "checksum"))
        try:
            self._checker.require(action)
        except WeightsError as error:
            return failure(str(error))
        data = yield partial(self._checker.check, action)
        return True, "ok", data, None


def _default_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _whole(
    payload: dict[str, Any], key: str, least: int, most: int, default: int | None = None
) -> int:
    """Raises WeightsError for anything but a whole number within the bounds."""
    value = payload.get(key, default)
    if type(value) is not int or not least <= value <= most:
        raise WeightsError(f"{key} must be a whole number within {least} and {most}")
    return value
