"""The admin actions on weights, as a text stage answers them (api-server.md 2.4, 3, 9.1).

Invariant: reading, receiving, copying and hashing happen in an operation's own thread, and one
operation at a time. What is wrong with a request is told before a group or a weight is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_proxy.collective.rendezvous import Rendezvous
from omni_proxy.collective.specs import GroupError, plan_of, specs_of
from omni_proxy.replica.pipeline.messages import Admin
from omni_proxy.replica.text.admin import Answer, failure
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.text.slow import PeerFault
from omni_proxy.replica.weights.checker import Checker
from omni_proxy.replica.weights.disk import WeightsFolder
from omni_proxy.replica.weights.lifecycle import Lifecycle, Wish
from omni_proxy.replica.weights.target import Form, Staged, Target, WeightsFault
from omni_proxy.replica.weights.tensors import staged_of_serialized

if TYPE_CHECKING:
    from omni_proxy.collective.group import Groups

GROUP_NAME = "weight_update_group"
GROUP_SECS = 300.0
SELECTORS = ("all", "target")
ROWS_TOLD = 100

Steps = Generator[Callable[[], Any], Any, Answer]


@dataclass(frozen=True, slots=True)
class Rank:
    """Which part of a tensor-parallel model a stage's process holds."""

    rank: int = 0
    size: int = 1

    @property
    def layout(self) -> dict[str, int]:
        return {"tp_size": self.size, "rank": self.rank}


class WeightOperations:
    """Registers itself with `scheduler`; `weights_root` bounds what may be read from disk."""

    def __init__(
        self,
        scheduler: TextScheduler,
        *,
        weights_root: str = "/",
        rank: Rank = Rank(),
    ) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._target = Target(scheduler.worker.text.model)
        self._folder = WeightsFolder(weights_root)
        self._checker = Checker(self._target, rank.layout, scheduler.worker.whole)
        self._lifecycle = Lifecycle(scheduler, self._target)
        self._joined: Groups | None = None
        for function in (
            self.update_weights_from_disk,
            self.update_weights_from_tensor,
            self.update_weights_from_distributed,
            self.init_weights_update_group,
            self.begin_weight_update,
            self.end_weight_update,
            self.update_weight_version,
            self.get_weights_by_name,
            self.weights_checker,
        ):
            scheduler.register_slow_admin(function.__name__, function)
        # It ends a receive that would never end by itself.
        destroy = self.destroy_weights_update_group
        scheduler.register_slow_admin(destroy.__name__, destroy, beside=True)

    # Updates

    def update_weights_from_disk(self, order: Admin) -> Steps:
        payload, scheduler = order.payload, self._scheduler
        wish = Wish.of(payload, pause_on_failure=False)
        stage = partial(self._folder.stage, payload, self._target)
        answer = yield from self._lifecycle.update(wish, stage, {}, in_session=False)
        success, message, data, error = answer
        if success:
            message = "Succeeded to update model weights."
            scheduler.model_path = payload["model_path"]
            scheduler.load_format = payload.get("load_format") or scheduler.load_format
            # The whole model is new: what was gathered for the one before fits no more.
            self._lifecycle.session = None
        told = {
            "model_path": payload.get("model_path"),
            "weight_version": scheduler.weight_version,
            "token_step": payload.get("token_step", 0),
        }
        return success, message, data | told, error

    def update_weights_from_tensor(self, order: Admin) -> Steps:
        wish = Wish.of(order.payload, pause_on_failure=True)
        rank = self._rank
        stage = partial(staged_of_serialized, order.payload, self._target, rank.rank, rank.size)
        answer = yield from self._lifecycle.update(wish, stage, {"metadata_only": False})
        return answer

    def update_weights_from_distributed(self, order: Admin) -> Steps:
        payload = order.payload
        wish = Wish.of(payload, pause_on_failure=True)
        told = {"group_name": _group_name(payload), "names": payload.get("names")}
        answer = yield from self._lifecycle.update(wish, partial(self._receive, payload), told)
        return answer

    def _receive(self, payload: dict[str, Any]) -> Staged:
        """Take what a group sends, after a look at what is announced."""
        load_format = payload.get("load_format")
        specs = specs_of(*(payload.get(key) for key in ("names", "dtypes", "shapes")))
        staged = Staged(self._target)
        for each in plan_of(specs, load_format).tensors:
            staged.check(each.name, Form(getattr(torch, each.dtype), each.shape))
        received = self._groups().receive(_group_name(payload), specs, load_format)
        for name, tensor in received.items():
            staged.add(name, tensor)
        return staged

    # Groups

    def _groups(self) -> Groups:
        # Most replicas never join one: what that needs is imported where it is wanted.
        if self._joined is None:
            from omni_proxy.collective.group import Groups

            self._joined = Groups()
        return self._joined

    def init_weights_update_group(self, order: Admin) -> Steps:
        payload, name = order.payload, _group_name(order.payload)
        told = {
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
                timeout_s=order.timeout_s or GROUP_SECS,
            )
            yield partial(self._groups().init, rendezvous)
        except (WeightsFault, GroupError) as error:
            message = f"Failed to initialize custom process group: {error}"
            return False, message, told, message
        except PeerFault as fault:
            # What not every rank has joined is of use to none.
            with suppress(GroupError, PeerFault):
                yield partial(self._groups().destroy, name)
            message = f"Failed to initialize custom process group: {fault}"
            return False, message, told, message
        # Whoever makes a group begins anew: nobody is left who would end an older session.
        self._lifecycle.session = None
        return True, "Succeeded to initialize custom process group.", told, None

    def destroy_weights_update_group(self, order: Admin) -> Steps:
        name = _group_name(order.payload)
        try:
            yield partial(self._groups().destroy, name)
        except GroupError as error:
            return False, str(error), {"group_name": name}, str(error)
        message = "Succeeded to destroy custom process group."
        return True, message, {"group_name": name}, None

    # A sync in parts

    def begin_weight_update(self, order: Admin) -> Steps:
        selector = order.payload.get("selector", "all")
        yield from ()
        if selector not in SELECTORS:
            return failure(f"there is no {selector!r} model here: the selector is all or target")
        if self._lifecycle.session is not None:
            return failure(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._lifecycle.open_session()
        return True, "Succeeded to begin weight update.", {"selector": selector}, None

    def end_weight_update(self, order: Admin) -> Steps:
        answer = yield from self._lifecycle.end_session()
        return answer

    def update_weight_version(self, order: Admin) -> Steps:
        version = order.payload.get("new_version")
        yield from ()
        if not isinstance(version, str) or not version:
            return failure("new_version must be a text that is not empty")
        dropped = 0
        if order.payload.get("abort_all_requests", True):
            dropped = self._scheduler.drop_all()
        self._lifecycle.name_version(version)
        data = {"new_version": version, "num_paused_requests": dropped}
        return True, f"Weight version updated to {version}.", data, None

    # Looking

    def get_weights_by_name(self, order: Admin) -> Steps:
        name = order.payload.get("name")
        try:
            rows = _whole(order.payload, "truncate_size", 0, 2**40, ROWS_TOLD)
            own = self._target.own_name(name if isinstance(name, str) else "")
        except WeightsFault as error:
            return failure(str(error))
        values = yield partial(self._rows, own, rows)
        return True, "ok", {"name": name, "parameter": values}, None

    def _rows(self, name: str, count: int) -> list[Any]:
        """The first rows of the whole tensor; at other ranks than the first, of the part here."""
        tensor = self._target.live(name)
        whole = self._scheduler.worker.whole(name, tensor)
        held = tensor if whole is None else whole
        rows: list[Any] = held[:count].detach().float().cpu().tolist()
        return rows

    def weights_checker(self, order: Admin) -> Steps:
        action = str(order.payload.get("action", "checksum"))
        try:
            self._checker.require(action)
        except WeightsFault as error:
            return failure(str(error))
        data = yield partial(self._checker.check, action)
        return True, "ok", data, None


def _group_name(payload: dict[str, Any]) -> str:
    return str(payload.get("group_name") or GROUP_NAME)


def _default_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _whole(
    payload: dict[str, Any], key: str, least: int, most: int, default: int | None = None
) -> int:
    """Raises WeightsFault for anything but a whole number within the bounds."""
    value = payload.get(key, default)
    if type(value) is not int or not least <= value <= most:
        raise WeightsFault(f"{key} must be a whole number within {least} and {most}")
    return value
