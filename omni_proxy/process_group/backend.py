"""A process group of our own among a trainer's ranks: gloo on the CPU, NCCL on a GPU.

It is built directly over prefixed stores with the keys that torch's own group constructor uses, so
that trainers need nothing special. It is never the default group and has no name inside torch.
Everything here may block and belongs into an `BlockingCall`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from omni_proxy.process_group.blocking_call import BlockingCall
from omni_proxy.process_group.buffers import Buffers, no_room
from omni_proxy.process_group.rendezvous import GLOO, NCCL, Meeting, Rendezvous
from omni_proxy.process_group.tensor_plan import GroupError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.distributed_c10d import BroadcastOptions, Store

SOURCE_RANK: Final = 0

# Both sides need the first (two-phase.md 1.2). Without the others torch ends the whole process
# when a collective times out or an abort takes long: here only the group may die.
NCCL_ENVIRONMENT: Final = {
    "NCCL_CUMEM_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
# How long an NCCL trainer may take from joining to its first broadcast.
FIRST_BROADCAST_SECS: Final = 24 * 3600.0


class Backend(Protocol):
    """The part of a group that `receive` needs."""

    backend: str

    def block(self, nbytes: int, kept: Buffers) -> torch.Tensor:
        """Flat uint8 memory of `nbytes`; raises GroupError where there is not so much."""
        ...

    def receive(
        self,
        parts: Sequence[torch.Tensor],
        landed: Callable[[int], None],
        posted: Callable[[], None],
        timeout_secs: float,
    ) -> None:
        """Receives one broadcast of rank 0 into each part; blocks. `landed(n)`: n are complete.

        `posted()`: from now on the trainer may send.
        """
        ...

    def send(
        self, parts: Sequence[torch.Tensor], landed: Callable[[int], None], timeout_secs: float
    ) -> None:
        """Broadcasts each part as rank 0; blocks. `landed(n)`: n have left."""
        ...

    def abort(self) -> None:
        """Ends what is blocked inside, where the backend can."""
        ...


def require_backend(backend: str, device: int = 0) -> None:
    """Raises GroupError where this machine or this torch cannot join such a group."""
    import torch.distributed as dist

    if not dist.is_available():
        raise GroupError("this torch is built without torch.distributed: it can join no group")
    if backend == GLOO and not dist.is_gloo_available():
        raise GroupError("this torch is built without gloo")
    if backend == NCCL:
        import torch

        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise GroupError(
                "backend 'nccl' needs a CUDA device and a torch built with NCCL, and here is "
                "none: let the trainer make the group with backend 'gloo'"
            )
        if device >= (there := torch.cuda.device_count()):
            raise GroupError(
                f"rank {device} of this replica needs GPU {device} for itself, and {there} are "
                "there: give it as many as it has ranks (CUDA_VISIBLE_DEVICES), or let the trainer "
                "make the group with backend 'gloo'"
            )


def join(rendezvous: Rendezvous, address: tuple[str, int], within_secs: float) -> Backend:
    """Meets the other ranks; blocks until all are there. Raises what torch raises."""
    from torch._C._distributed_c10d import TCPStore

    # Waiting for the workers is what makes us count: a trainer whose store comes from a tcp://
    # rendezvous sits in its constructor until every rank has been counted there.
    store = TCPStore(
        address[0],
        address[1],
        rendezvous.world_size,
        is_master=False,
        timeout=timedelta(seconds=within_secs),
        wait_for_workers=True,
    )
    return _group(rendezvous, store, within_secs)


def own_store(meeting: Meeting) -> TCPStore:
    """A store on the meeting's own address, where the other ranks come to; returns at once.

    Raises GroupError where that cannot be listened on.
    """
    from torch._C._distributed_c10d import TCPStore

    try:
        # Ours to open: torch by itself would listen on every address of this machine.
        listener = socket.create_server((meeting.host, meeting.port), family=_family(meeting.host))
    except OSError as error:
        raise GroupError(f"no store at {meeting.host}:{meeting.port}: {error}") from None
    return TCPStore(
        meeting.host,
        listener.getsockname()[1],
        meeting.world_size,
        is_master=True,
        timeout=timedelta(seconds=meeting.timeout_s),
        # It would wait for who can only come when it has been told of this port.
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def lead(meeting: Meeting, store: TCPStore, within_secs: float) -> Backend:
    """Meets the other ranks as rank 0; blocks until all are there. Raises what torch raises."""
    us = Rendezvous(
        meeting.host,
        store.port,
        SOURCE_RANK,
        meeting.world_size,
        meeting.group_name,
        meeting.backend,
        meeting.timeout_s,
    )
    return _group(us, store, within_secs)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _group(rendezvous: Rendezvous, store: Store, within_secs: float) -> Backend:
    from torch._C._distributed_c10d import PrefixStore

    name = rendezvous.group_name
    named = PrefixStore(f"{name}/", PrefixStore(name, store))
    if rendezvous.backend == GLOO:
        return Gloo(rendezvous, PrefixStore("cpu/", named), within_secs)
    return Nccl(rendezvous, PrefixStore("cuda/", named))


class Gloo:
    """Bytes into CPU memory. Nothing but the peer or the timeout ends a blocked receive."""

    backend = GLOO

    def __init__(self, rendezvous: Rendezvous, store: Store, within_secs: float) -> None:
        from torch.distributed import ProcessGroupGloo

        # torch's own type hints leave out what both kinds of group can do.
        self._group: Any = ProcessGroupGloo(
            store, rendezvous.rank, rendezvous.world_size, timedelta(seconds=within_secs)
        )

    def block(self, nbytes: int, kept: Buffers) -> torch.Tensor:
        return kept.take(nbytes)

    def receive(
        self,
        parts: Sequence[torch.Tensor],
        landed: Callable[[int], None],
        posted: Callable[[], None],
        timeout_secs: float,
    ) -> None:
        options = _from_source(timeout_secs)
        works = [self._group.broadcast([part], options) for part in parts[:1]]
        # The peer may begin while the others are posted: a model's hundreds take a while.
        posted()
        works += [self._group.broadcast([part], options) for part in parts[1:]]
        for count, work in enumerate(works, start=1):
            work.wait()
            landed(count)

    def send(
        self, parts: Sequence[torch.Tensor], landed: Callable[[int], None], timeout_secs: float
    ) -> None:
        self.receive(parts, landed, lambda: None, timeout_secs)

    def abort(self) -> None:
        """Gloo has no such thing: its abort() and shutdown() do nothing (weight-sync.md 0.1)."""


class Nccl:
    """Bytes into GPU memory. An abort from another thread ends a blocked receive.

    Trainers build the communicator at once or with their first broadcast, and we cannot know
    which: ours is built in a thread of its own, which fits both.
    """

    backend = NCCL

    def __init__(self, rendezvous: Rendezvous, store: Store) -> None:
        import torch
        from torch.distributed import ProcessGroupNCCL

        for key, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        store.set_timeout(timedelta(seconds=FIRST_BROADCAST_SECS))
        options = ProcessGroupNCCL.Options()
        # torch's own deadline would end more than the group: ours has to come first.
        options._timeout = timedelta(seconds=2 * rendezvous.timeout_s + 60)
        self._device = torch.device("cuda", rendezvous.device)
        self._group: Any = ProcessGroupNCCL(store, rendezvous.rank, rendezvous.world_size, options)
        group, device = self._group, self._device
        self._connecting: BlockingCall[None] = BlockingCall(
            f"weights-connect-{rendezvous.group_name}",
            lambda _: group.eager_connect_single_device(device),
        )

    def block(self, nbytes: int, kept: Buffers) -> torch.Tensor:
        import torch

        free, _ = torch.cuda.mem_get_info(self._device)
        if nbytes > free:
            raise no_room(nbytes, free)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def receive(
        self,
        parts: Sequence[torch.Tensor],
        landed: Callable[[int], None],
        posted: Callable[[], None],
        timeout_secs: float,
    ) -> None:
        import torch

        # Before the connecting: a trainer whose first broadcast it is would wait for our word.
        posted()
        self._connecting.ended(timeout_secs)
        self._connecting.take()
        with torch.cuda.device(self._device):
            if all(part.device.type == "cuda" for part in parts):
                self._at_once(parts, landed, timeout_secs)
            else:
                self._by_way_of_the_gpu(parts, landed, timeout_secs, sends=False)

    def send(
        self, parts: Sequence[torch.Tensor], landed: Callable[[int], None], timeout_secs: float
    ) -> None:
        import torch

        self._connecting.ended(timeout_secs)
        self._connecting.take()
        with torch.cuda.device(self._device):
            self._by_way_of_the_gpu(parts, landed, timeout_secs, sends=True)

    def _at_once(
        self, parts: Sequence[torch.Tensor], landed: Callable[[int], None], timeout_secs: float
    ) -> None:
        import torch

        options = _from_source(timeout_secs)
        works = [self._group.broadcast([part], options) for part in parts]
        for count, work in enumerate(works, start=1):
            work.wait()  # of the stream, not of this thread
            torch.cuda.current_stream().synchronize()
            landed(count)

    def _by_way_of_the_gpu(
        self,
        parts: Sequence[torch.Tensor],
        landed: Callable[[int], None],
        timeout_secs: float,
        *,
        sends: bool,
    ) -> None:
        """Memory of the host, one message after the other through one buffer on the GPU."""
        import torch

        options = _from_source(timeout_secs)
        size = max((part.numel() for part in parts), default=0)
        bounce = torch.empty(size, dtype=torch.uint8, device=self._device)
        for count, part in enumerate(parts, start=1):
            there = bounce[: part.numel()]
            # Marks of a receive travel too, or what never came would be taken for the rest.
            there.copy_(part)
            self._group.broadcast([there], options).wait()
            if not sends:
                part.copy_(there)
            torch.cuda.current_stream().synchronize()
            landed(count)

    def abort(self) -> None:
        self._group.abort()


def _from_source(timeout_secs: float) -> BroadcastOptions:
    from torch.distributed.distributed_c10d import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = SOURCE_RANK
    options.timeout = timedelta(seconds=timeout_secs)
    return options


def told(error: RuntimeError) -> str:
    """What torch says went wrong, without its place in torch's source, its advice and its stack."""
    first, *_ = str(error).splitlines() or [type(error).__name__]
    first, _, _ = first.partition(" This is typically caused by")
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", first)
