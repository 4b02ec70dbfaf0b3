"""Weight syncs with vLLM's calls: init once, then start, update, finish (note:features 3.2).

The trainer is rank 0 of a group without a name, whose store has its keys below the group's address,
like vLLM's own stateless groups: a trainer that has vLLM creates the same group with
`stateless_init_torch_distributed_process_group(host, port, 0, world_size, "gloo")`. Only the status
of responses is checked, as in vLLM's clients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

from tools.training.endpoint import Answer, Endpoint
from tools.training.group import POLL_SECS, ListeningGroup, SyncFailed, first_line
from tools.training.sync import Synced

TRAINER_RANK = 0
PACKED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of a sync.

    `pause_mode` None means no pause, `packed_bytes` 0 one message for each tensor. `chunks` is the
    number of update calls of a sync, which the tensors are divided between.
    """

    pause_mode: str | None = "keep"
    packed_bytes: int = 0
    chunks: int = 1
    timeout_secs: float = 120.0
    host: str = "127.0.0.1"


class StatelessGroup(ListeningGroup):
    """A group without a name, as in vLLM's trainers."""

    def __init__(self, world_size: int, host: str, timeout_secs: float) -> None:
        super().__init__(host, world_size, timeout_secs)
        self._prefix = f"tcp://{host}:{self.port}"

    def _construct(self) -> Any:
        store = c10d.PrefixStore(self._prefix, self._store)
        return ProcessGroupGloo(store, TRAINER_RANK, self.world_size, self._timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0 to all. Raises SyncFailed."""
        options = c10d.BroadcastOptions()
        options.rootRank = TRAINER_RANK
        options.timeout = self._timeout
        try:
            self._group.broadcast([tensor.contiguous()], options).wait()
        except RuntimeError as error:
            raise SyncFailed(f"the broadcast failed: {first_line(error)}") from error


@dataclass(slots=True)
class Transfer:
    """A trainer and its group, which is kept between syncs; a failed sync drops it."""

    endpoint: Endpoint
    options: TransferOptions = field(default_factory=TransferOptions)
    group: StatelessGroup | None = None

    def sync(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: str | None,
        midway: Callable[[], None] = lambda: None,
    ) -> Synced:
        """Errors are in the result; `midway` is called before the last update."""
        started, before = time.monotonic(), len(self.endpoint.calls)
        why, moved_at, moved_secs = "", 0.0, 0.0
        paused = False
        try:
            self._joined()
            if self.options.pause_mode is not None:
                self._call(f"/pause?mode={self.options.pause_mode}")
                paused = True
            self._call("/start_weight_update")
            moved_at = time.monotonic()
            self._update_all(tensors, midway)
            self._call("/finish_weight_update", {"weight_version": version})
            moved_secs = time.monotonic() - moved_at
        except SyncFailed as error:
            why, self.group = str(error) or "it failed without a reason", None
        if paused:
            self._post("/resume")
        nbytes = sum(each.nbytes for each in tensors.values())
        calls = self.endpoint.calls[before:]
        return Synced(why, time.monotonic() - started, moved_at, moved_secs, nbytes, calls)

    def close(self) -> None:
        """Release the engines; the result of the call is ignored."""
        if self.group is not None:
            self._post("/shutdown_weight_transfer_engine")
            self.group = None

    def _joined(self) -> None:
        if self.group is not None:
            return
        reported = self.endpoint.call("/get_world_size")
        ranks = reported.body.get("world_size")
        if not isinstance(ranks, int):
            raise SyncFailed(f"/get_world_size answered {reported.status}: {reported.why}")
        group = StatelessGroup(1 + ranks, self.options.host, self.options.timeout_secs)
        info = {
            "master_address": self.options.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world_size,
            "packed": bool(self.options.packed_bytes),
            "packed_buffer_size_bytes": self.options.packed_bytes or PACKED_BYTES,
        }
        group.join(Calling(self, "/init_weight_transfer_engine", {"init_info": info}))
        self.group = group

    def _update_all(self, tensors: Mapping[str, torch.Tensor], midway: Callable[[], None]) -> None:
        names = list(tensors)
        size = -(-len(names) // self.options.chunks)
        chunks = [names[start : start + size] for start in range(0, len(names), size)]
        for number, chunk in enumerate(chunks, start=1):
            if number == len(chunks):
                midway()
            self._update({name: tensors[name] for name in chunk})

    def _update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send the bytes while the call is in progress; a refused call ends the wait for it."""
        assert self.group is not None
        info = {
            "names": list(tensors),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
        }
        call = Calling(self, "/update_weights", {"update_info": info})
        group, failed = self.group, list[SyncFailed]()

        def send() -> None:
            try:
                for message in messages(list(tensors.values()), self.options.packed_bytes):
                    group.broadcast(message)
            except SyncFailed as error:
                failed.append(error)

        sending = threading.Thread(target=send, name="broadcast", daemon=True)
        sending.start()
        while sending.is_alive():
            sending.join(POLL_SECS)
            if why := call.refused():  # no rank receives: gloo would wait for its timeout
                raise SyncFailed(why)
        if why := call.wait():
            raise SyncFailed(why)
        if failed:
            raise failed[0]

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        answer = self._post(path, body)
        if why := refusal(answer):
            raise SyncFailed(why)

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        return self.endpoint.call(path, dict(body or {}))


class Calling:
    """A call in its own thread (a `PendingCall`); only its status is checked."""

    def __init__(self, transfer: Transfer, path: str, body: dict[str, Any]) -> None:
        self._pending = transfer.endpoint.begin(path, body)

    def refused(self) -> str:
        return self.wait() if self._pending.ended.is_set() else ""

    def wait(self) -> str:
        return refusal(self._pending.answer())


def refusal(answer: Answer) -> str:
    """Why a call was refused; "" if it was not."""
    good = 200 <= answer.status < 300
    return "" if good else f"{answer.path} answered {answer.status}: {answer.why}"


def messages(tensors: Sequence[torch.Tensor], packed_bytes: int) -> list[torch.Tensor]:
    """The messages to broadcast: one per tensor, or packed until one exceeds the buffer size."""
    if not packed_bytes:
        return list(tensors)
    made: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    for number, tensor in enumerate(tensors, start=1):
        parts.append(tensor.contiguous().reshape(-1).view(torch.uint8))
        if sum(part.numel() for part in parts) > packed_bytes or number == len(tensors):
            made.append(torch.cat(parts))
            parts = []
    return made
