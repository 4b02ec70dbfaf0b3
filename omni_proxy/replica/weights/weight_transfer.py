"""The admin actions of vLLM's weight routes: init, start, update, finish (note:features 3.2).

    init: join the trainer's group ──> start ──> update (announce, receive) * ──> finish: swap
vLLM's protocol does not name the group: keys in the store of rank 0, the trainer, begin with the
group's address (`Rendezvous.stateless`). Tensors received between start and finish are gathered and
swapped in only by finish, so a failed update leaves the old weights unchanged; as in vLLM, it ends
the open update. Running requests do not prevent an update: they are recomputed after the swap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch

from omni_proxy.process_group.rendezvous import GLOO, Rendezvous
from omni_proxy.process_group.tensor_plan import FLATTENED, ITEM_BYTES, GroupError
from omni_proxy.replica.pipeline.stage_messages import Admin
from omni_proxy.replica.text.operations import BackgroundStep, PeerError, Steps, failure
from omni_proxy.replica.weights.lifecycle import (
    Lifecycle,
    OpenUpdate,
    StagingSteps,
    UpdateOptions,
)
from omni_proxy.replica.weights.live_tensors import LiveTensors, StagedTensors
from omni_proxy.replica.weights.receive_state import CallOutOfOrder
from omni_proxy.replica.weights.trainer_groups import (
    ArmRequest,
    PendingTransfer,
    StepGenerator,
    TrainerGroups,
)

GROUP_NAME: Final = "weight_transfer"
PACKED_BUFFER_BYTES: Final = 1 << 30  # vLLM's default
RESET_DEVIATION: Final = 0.02

INIT: Final = "init_weight_transfer_engine"
NOT_STARTED = "start_weight_update must be called before update_weights."
NOT_JOINED = f"weight transfer is not initialized: call {INIT} first"
STARTED = (
    "start_weight_update called while a weight update is already active. Call "
    "finish_weight_update first."
)
NO_MATCH = "finish_weight_update called without a matching start_weight_update."
NO_DRAFT = "there is no draft model here: call start_weight_update"
IN_UPDATE = "Cannot release a trainer connection during a weight update"


@dataclass(frozen=True, slots=True)
class WireForm:
    """How tensors are broadcast: one message each, or packed into messages of about equal size."""

    packed: bool = False
    buffer_bytes: int = PACKED_BUFFER_BYTES

    @classmethod
    def of(cls, info: Mapping[str, Any], default: WireForm | None = None) -> WireForm:
        """Parse the init's or an update's fields; raises GroupError.

        vLLM 0.32 sends them in the init, older trainers in each update.
        """
        before = default or cls()
        packed = info.get("packed", before.packed)
        size = info.get("packed_buffer_size_bytes", before.buffer_bytes)
        if not isinstance(packed, bool):
            raise GroupError(f"packed must be true or false, not {packed!r}")
        if type(size) is not int or size < 1:
            raise GroupError(f"packed_buffer_size_bytes must be 1 or more, not {size!r}")
        return cls(packed, size)


def announced(info: Mapping[str, Any], form: WireForm) -> dict[str, Any]:
    """An update_info in the format of a plan (`parse_plans`); raises GroupError.

    A packed message is filled with tensors, in order, until it exceeds the buffer size. The trainer
    packs them in the same way: both sides must agree.
    """
    names, dtypes, shapes = (info.get(key) for key in ("names", "dtype_names", "shapes"))
    for key, value in (("names", names), ("dtype_names", dtypes), ("shapes", shapes)):
        if not isinstance(value, list):
            raise GroupError(f"update_info.{key} must be a list")
    assert isinstance(names, list)
    assert isinstance(dtypes, list)
    assert isinstance(shapes, list)
    for key, value in (("dtype_names", dtypes), ("shapes", shapes)):
        if len(value) != len(names):
            raise GroupError(
                f"`{key}` should be of the same size as `names`: got {len(value)} and {len(names)}"
            )
    if not form.packed:
        return {"names": names, "dtypes": dtypes, "shapes": shapes}
    sizes = [_nbytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    ends = packed_ends(sizes, form)
    buckets = [
        {"names": names[start:end], "dtypes": dtypes[start:end], "shapes": shapes[start:end]}
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return {"buckets": buckets, "load_format": FLATTENED}


def packed_ends(sizes: Sequence[int], form: WireForm) -> list[int]:
    """The end of each packed message: the index after its last tensor."""
    ends: list[int] = []
    filled = 0
    for index, nbytes in enumerate(sizes, start=1):
        filled += nbytes
        if filled > form.buffer_bytes or index == len(sizes):
            ends.append(index)
            filled = 0
    return ends


def _nbytes(dtype: Any, shape: Any) -> int:
    """The tensor's bytes; 0 for an invalid dtype or shape, which the plan refuses by name."""
    bare = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    valid = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return prod(shape) * ITEM_BYTES.get(bare, 0) if valid else 0


class WeightTransfer:
    """Each public method is an admin action of the text stage."""

    def __init__(
        self, lifecycle: Lifecycle, sync: TrainerGroups, target: LiveTensors, rank: int
    ) -> None:
        self._lifecycle = lifecycle
        self._sync = sync
        self._target = target
        self._rank = rank
        self._form = WireForm()
        self._joined = False

    def init_weight_transfer_engine(self, order: Admin) -> Steps:
        """Join the trainer's group, after leaving an earlier one, as in vLLM."""
        info = order.payload.get("init_info")
        info = info if isinstance(info, dict) else {}
        try:
            form = WireForm.of(info)
            rendezvous = self._rendezvous(info)
            self._sync.refresh()
            self._sync.receive_state.require_free()
            if self._joined:
                yield from self._leave()
            yield from self._sync.join(rendezvous)
        except (GroupError, PeerError) as error:
            return failure(str(error))
        self._form, self._joined = form, True
        self._lifecycle.integrity.broken()
        yield from self._lifecycle.discard_update()
        response = {"rank": rendezvous.rank, "world_size": rendezvous.world_size}
        return True, "Weight transfer initialized", response, None

    def shutdown_weight_transfer_engine(self, order: Admin) -> Steps:
        if self._lifecycle.open_update is not None:
            return failure(IN_UPDATE)
        if self._joined:
            yield from self._leave()
        return True, "Weight transfer shut down", {}, None

    def start_weight_update(self, order: Admin) -> Steps:
        yield from ()
        if order.payload.get("draft"):
            return failure(NO_DRAFT)
        if self._lifecycle.open_update is not None:
            return failure(STARTED)
        self._lifecycle.begin_update()
        return True, "Weight update started", {}, None

    def update_weights(self, order: Admin) -> Steps:
        """Receive the announced tensors into the open update."""
        open_update = self._lifecycle.open_update
        if open_update is None:
            return failure(NOT_STARTED)
        if not self._joined:
            yield from self._lifecycle.discard_update()
            return failure(NOT_JOINED)
        box: list[PendingTransfer] = []
        options = UpdateOptions(whole=False)
        staging = self._receive(order.payload.get("update_info"), open_update, box)
        success, message, data, error = yield from self._lifecycle.apply_update(
            options, staging, {}
        )
        for current in box:
            yield from self._sync.settle(current, kept=success)
        if not success:
            if self._lifecycle.open_update is open_update:
                yield from self._lifecycle.discard_update()
            return failure(message.replace("init_weights_update_group", INIT))
        return True, "Weights updated", data, error

    def finish_weight_update(self, order: Admin) -> Steps:
        open_update = self._lifecycle.open_update
        if open_update is None:
            return failure(NO_MATCH)
        self._sync.refresh()
        try:
            self._sync.receive_state.require_free()
        except CallOutOfOrder as refusal:
            return failure(str(refusal))
        version = order.payload.get("weight_version")
        if version is not None:
            open_update.weight_version = str(version)
        success, message, data, error = yield from self._lifecycle.end_update(running=True)
        return success, "Weight update finished" if success else message, data, error

    def reset_weights(self, order: Admin) -> Steps:
        """Overwrite every tensor with random values, so that tests can verify a later update."""
        yield self._randomize
        self._lifecycle.overwritten()
        return True, "Weights reset", {}, None

    def _randomize(self) -> None:
        with torch.no_grad():
            for _, tensor in self._target:
                if tensor.is_floating_point():
                    tensor.normal_(0.0, RESET_DEVIATION)

    def _leave(self) -> StepGenerator[None]:
        self._joined = False
        with suppress(GroupError):  # it has already ended
            yield from self._sync.leave(GROUP_NAME)

    def _receive(
        self, info: Any, open_update: OpenUpdate, box: list[PendingTransfer]
    ) -> StagingSteps:
        if isinstance(info, list):  # one for each rank of the engine
            place = self._rank
            info = info[place] if place < len(info) else None
        if not isinstance(info, dict):
            raise GroupError("update_info must be an object, or a list with one for each rank")
        payload = announced(info, WireForm.of(info, self._form))
        terms = self._sync.terms
        plans = yield BackgroundStep(lambda: self._sync.planned(payload))
        wanted = ArmRequest(GROUP_NAME, plans, terms.ready_secs)
        current = yield from self._sync.arm(wanted, halting=False)
        box.append(current)
        self._sync.completing(GROUP_NAME)
        yield from self._sync.await_received(current, terms.receive_secs, halting=False)
        staged: StagedTensors = yield BackgroundStep(lambda: self._sync.stage(current))
        if self._lifecycle.open_update is not open_update:
            staged.forget()
            raise GroupError("the weight update was ended while tensors were being received")
        return staged

    def _rendezvous(self, info: Mapping[str, Any]) -> Rendezvous:
        """Raises GroupError for invalid fields."""
        if info.get("nccl_unique_id_b64"):
            raise GroupError(
                "nccl_unique_id_b64 needs NCCL without a store: give master_address and master_port"
            )
        numbers = {}
        for key in ("rank_offset", "world_size"):
            value = info.get(key)
            if type(value) is not int:
                raise GroupError(f"init_info.{key} must be a whole number, not {value!r}")
            numbers[key] = value
        return Rendezvous(
            master_address=info.get("master_address", ""),
            master_port=info.get("master_port", 0),
            rank=numbers["rank_offset"] + self._rank,
            world_size=numbers["world_size"],
            group_name=GROUP_NAME,
            backend=GLOO,
            timeout_s=self._sync.terms.join_secs,
            stateless=True,
        )
