"""One sync from its first call to its last, as in real trainers (note:two-phase 1.9).

init with a concurrent join -> pause -> the tensors -> destroy -> continue. After a failure that
follows the pause, continue comes before destroy, regardless of the weights' state, as in real
trainers. After a failed init, no call follows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tools.training.buckets import MIB, buckets_of
from tools.training.endpoint import Answer, Endpoint
from tools.training.faults import Fault, TwoAtOnce
from tools.training.forms import FORMS, Sending, call_or_raise
from tools.training.group import Group, GroupRendezvous, SyncFailed

DISK = "disk"
VLLM = "vllm"  # not a form of this file: see transfer.py
INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """How a trainer syncs: `form` is `disk` or one of `forms.FORMS`.

    Without `pause_mode` there is no pause. `session` adds begin_weight_update and
    end_weight_update around the tensors. `timeout_secs` bounds every call, the join and each
    broadcast.
    """

    form: str = "two-phase"
    backend: str = "gloo"
    bucket_bytes: int = 64 * MIB
    load_format: str | None = None
    pause_mode: str | None = "retract"
    group_name: str = "weight_sync_group"
    session: bool = False
    timeout_secs: float = 120.0
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Synced:
    """The result of a sync; `why` is the first cause of a failure, else "".

    `moved_secs` is the time from the first announcement, at `moved_at` of the monotonic clock, to
    the last answer about the bytes.
    """

    why: str
    secs: float
    moved_at: float
    moved_secs: float
    nbytes: int
    calls: Sequence[Answer]

    @property
    def ok(self) -> bool:
        return not self.why


@dataclass(slots=True)
class Sync:
    """One sync of `tensors` as `version`; `run` may be called only once."""

    endpoint: Endpoint
    tensors: Mapping[str, torch.Tensor]
    version: str
    options: SyncOptions = field(default_factory=SyncOptions)
    fault: Fault = field(default_factory=Fault)
    _moved_at: float = 0.0
    _moved_secs: float = 0.0

    def run(self) -> Synced:
        """Run the sync; errors are in the result."""
        started, before = time.monotonic(), len(self.endpoint.calls)
        why = ""
        try:
            if self.options.form == DISK:
                self._from_disk()
            else:
                self._in_a_group()
        except SyncFailed as error:
            why = str(error) or "it failed without a reason"
        secs = time.monotonic() - started
        nbytes = sum(each.nbytes for each in self.tensors.values())
        calls = self.endpoint.calls[before:]
        return Synced(why, secs, self._moved_at, self._moved_secs, nbytes, calls)

    def _from_disk(self) -> None:
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
            file = Path(folder) / "model.safetensors"
            announced = self.fault.announced(buckets_of(self.tensors, self.options.bucket_bytes))
            save_file({name: each for one in announced for name, each in one.filed()}, file)
            body = {"model_path": str(file), "weight_version": self.version}
            try:
                self._pause()
                self.fault.before()
                self._moved_at = time.monotonic()
                call_or_raise(self.endpoint, "/update_weights_from_disk", body)
                self._moved_secs = time.monotonic() - self._moved_at
            finally:
                self._continue()

    def _in_a_group(self) -> None:
        try:
            world_size = 1 + self.endpoint.ranks()
        except ValueError as error:
            raise SyncFailed(str(error)) from error
        group = self._listening(self.options.group_name, world_size)
        if isinstance(self.fault, TwoAtOnce):
            self.fault.second_trainer = lambda: self._second_trainer(world_size)
        try:
            port = self.fault.master_port(group.port)
            group.join(self.endpoint.begin(INIT, self._init(group, port)))
            self._paused(group)
        finally:
            group.leave()

    def _paused(self, group: Group) -> None:
        name = {"group_name": group.settings.group_name}
        try:
            self._pause()
            self._move(group)
        except SyncFailed:
            self._continue()
            self.endpoint.call(DESTROY, name)
            raise
        self.endpoint.call(DESTROY, name)
        self._continue()

    def _move(self, group: Group) -> None:
        options = self.options
        sending = Sending(self.endpoint, group, self.version, options.load_format, self.fault)
        self._moved_at = time.monotonic()
        if options.session:
            call_or_raise(self.endpoint, "/begin_weight_update", {"selector": "all"})
        FORMS[options.form](sending, buckets_of(self.tensors, options.bucket_bytes))
        if options.session:
            call_or_raise(self.endpoint, "/end_weight_update", {})
        self._moved_secs = time.monotonic() - self._moved_at

    def _listening(self, group_name: str, world_size: int) -> Group:
        options = self.options
        settings = GroupRendezvous(
            group_name, world_size, options.backend, options.timeout_secs, options.host
        )
        return Group(settings)

    def _init(self, group: Group, port: int) -> dict[str, Any]:
        settings = group.settings
        return {
            "master_address": settings.host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": settings.world_size,
            "group_name": settings.group_name,
            "backend": settings.backend,
        }

    def _second_trainer(self, world_size: int) -> Answer:
        """Send another trainer's init, with its own store, in the middle of this sync."""
        second_trainer = self._listening(f"{self.options.group_name}_2", world_size)
        return self.endpoint.call(INIT, self._init(second_trainer, second_trainer.port))

    def _pause(self) -> None:
        if self.options.pause_mode is not None:
            call_or_raise(self.endpoint, PAUSE, {"mode": self.options.pause_mode})

    def _continue(self) -> None:
        if self.options.pause_mode is not None:
            self.endpoint.call(CONTINUE, {})
