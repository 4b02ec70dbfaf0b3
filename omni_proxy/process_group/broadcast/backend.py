"""A process group with a trainer's ranks: gloo on the CPU, NCCL on a GPU.

The group is built directly over prefixed stores, with the same keys as the trainer's constructor
(torch's or vLLM's), so that trainers need no special code. Invariant: it is never torch's default
group and has no name inside torch. All functions here may block: call them in a `BlockingCall`.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from omni_proxy.process_group.blocking_call import BlockingCall
from omni_proxy.process_group.broadcast.buffers import BufferPool
from omni_proxy.process_group.broadcast.mapped_file import out_of_memory_error
from omni_proxy.process_group.rendezvous import GLOO, NCCL, HostedRendezvous, Rendezvous
from omni_proxy.process_group.tensor_plan import GroupError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.distributed_c10d import BroadcastOptions, Store

SOURCE_RANK: Final = 0

# Both sides need the first variable (note:two-phase 1.2). Without the others, torch ends the whole
# process if a collective times out or an abort takes long; here only the group may end.
NCCL_ENVIRONMENT: Final = {
    "NCCL_CUMEM_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
# A vLLM trainer with a bare NCCL communicator puts its id under NCCL_ID_KEY; one with gloo puts its
# address under GLOO_KEY, for which GLOO_KEY_SECS are allowed.
NCCL_ID_KEY: Final = "broadcast_from/0/0"
GLOO_KEY: Final = "/0/0"  # the key of rank 0
_STATELESS_KEY: Final = re.compile(r"tcp://.+:\d+/0/0")
GLOO_KEY_SECS: Final = 2.0
GLOO_POLL_SECS: Final = 0.01
# Longest time between an NCCL trainer's joining and its first broadcast.
FIRST_BROADCAST_SECS: Final = 24 * 3600.0


class Backend(Protocol):
    """The operations of a group that receives and senders use."""

    backend: str

    def allocate(self, nbytes: int, pool: BufferPool) -> torch.Tensor:
        """Flat uint8 memory of `nbytes`; raises GroupError if less is free."""
        ...

    def receive(
        self,
        parts: Sequence[torch.Tensor],
        on_complete: Callable[[int], None],
        posted: Callable[[], None],
        timeout_secs: float,
    ) -> None:
        """Receives one broadcast of rank 0 into each part; blocks.

        Calls `posted()` when the trainer may send, and `on_complete(n)` when n parts are complete.
        """
        ...

    def send(
        self,
        parts: Sequence[torch.Tensor],
        on_complete: Callable[[int], None],
        timeout_secs: float,
    ) -> None:
        """Broadcasts each part as rank 0; blocks. Calls `on_complete(n)` when n parts are sent."""
        ...

    def abort(self) -> None:
        """Ends blocked operations of the group, if the backend can."""
        ...


def require_backend(backend: str, device: int = 0) -> None:
    """Raises GroupError if this machine or its torch can't join a group of this backend."""
    import torch.distributed as dist

    if not dist.is_available():
        raise GroupError("this torch is built without torch.distributed: it can't join a group")
    if backend == GLOO and not dist.is_gloo_available():
        raise GroupError("this torch is built without gloo")
    if backend == NCCL:
        import torch

        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise GroupError(
                "backend 'nccl' needs a CUDA device and a torch built with NCCL, and this process "
                "has none: let the trainer make the group with backend 'gloo'"
            )
        if device >= (count := torch.cuda.device_count()):
            raise GroupError(
                f"rank {device} of this replica needs its own GPU {device}, but only {count} are "
                "visible: give it one for each rank (CUDA_VISIBLE_DEVICES), or let the trainer "
                "make the group with backend 'gloo'"
            )


def join_group(rendezvous: Rendezvous, address: tuple[str, int], timeout_secs: float) -> Backend:
    """Joins a trainer's group; blocks until all ranks have joined. Raises what torch raises."""
    from torch._C._distributed_c10d import TCPStore

    # `wait_for_workers` counts this rank: a trainer with a store from a tcp:// rendezvous blocks in
    # its constructor until every rank was counted there.
    store = TCPStore(
        address[0],
        address[1],
        rendezvous.world_size,
        is_master=False,
        timeout=timedelta(seconds=timeout_secs),
        wait_for_workers=True,
    )
    if rendezvous.stateless:
        return _make_stateless_group(rendezvous, store, address, timeout_secs)
    return _make_group(rendezvous, store, timeout_secs)


def open_store(rendezvous: HostedRendezvous) -> TCPStore:
    """Opens a store at the rendezvous's address for the other ranks. Doesn't block.

    Raises GroupError if the address cannot be bound.
    """
    from torch._C._distributed_c10d import TCPStore

    host = rendezvous.host
    try:
        # Bound here, because torch would listen on all addresses of this machine.
        listener = socket.create_server((host, rendezvous.port), family=_address_family(host))
    except OSError as error:
        raise GroupError(f"no store at {host}:{rendezvous.port}: {error}") from None
    return TCPStore(
        host,
        listener.getsockname()[1],
        rendezvous.world_size,
        is_master=True,
        timeout=timedelta(seconds=rendezvous.timeout_s),
        # The other ranks get the port only after this call returns.
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def host_group(rendezvous: HostedRendezvous, store: TCPStore, timeout_secs: float) -> Backend:
    """Forms the group as rank 0; blocks until all ranks have joined. Raises what torch raises."""
    own_rank = Rendezvous(
        rendezvous.host,
        store.port,
        SOURCE_RANK,
        rendezvous.world_size,
        rendezvous.group_name,
        rendezvous.backend,
        rendezvous.timeout_s,
    )
    return _make_group(own_rank, store, timeout_secs)


def _address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _make_group(rendezvous: Rendezvous, store: Store, timeout_secs: float) -> Backend:
    from torch._C._distributed_c10d import PrefixStore

    name = rendezvous.group_name
    group_store = PrefixStore(f"{name}/", PrefixStore(name, store))
    if rendezvous.backend == GLOO:
        return GlooBackend(rendezvous, PrefixStore("cpu/", group_store), timeout_secs)
    return NcclBackend(rendezvous, PrefixStore("cuda/", group_store))


def _make_stateless_group(
    rendezvous: Rendezvous, store: TCPStore, address: tuple[str, int], timeout_secs: float
) -> Backend:
    """Joins a group made by vLLM's `stateless_init_torch_distributed_process_group`.

    Raises GroupError for a trainer that uses NCCL outside of torch: such a group would never form.
    """
    from torch._C._distributed_c10d import PrefixStore

    host, port = address
    prefix = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    deadline, pause = time.monotonic() + min(timeout_secs, GLOO_KEY_SECS), threading.Event()
    while not store.check([f"{prefix}{GLOO_KEY}"]) and time.monotonic() < deadline:
        if (other_prefix := _other_prefix(store)) is not None:
            prefix = other_prefix
            break
        if store.check([NCCL_ID_KEY]):
            raise GroupError(
                "the trainer makes a bare NCCL communicator, but this engine runs on CPUs: let the "
                "trainer make its group by stateless_init_torch_distributed_process_group with gloo"
            )
        pause.wait(GLOO_POLL_SECS)
    return GlooBackend(rendezvous, PrefixStore(prefix, store), timeout_secs)


def _other_prefix(store: TCPStore) -> str | None:
    """The prefix of the trainer's keys, if the trainer uses another name for its address."""
    list_keys = getattr(store, "list_keys", None)  # only in newer versions of torch
    keys = list_keys() if list_keys is not None else ()
    return next((key[: -len(GLOO_KEY)] for key in keys if _STATELESS_KEY.fullmatch(key)), None)


class GlooBackend:
    """Receives into CPU memory. Only the peer or the timeout ends a blocked receive."""

    backend = GLOO

    def __init__(self, rendezvous: Rendezvous, store: Store, timeout_secs: float) -> None:
        from torch.distributed import ProcessGroupGloo

        # torch's type hints lack the methods that both kinds of group have.
        self._group: Any = ProcessGroupGloo(
            store, rendezvous.rank, rendezvous.world_size, timedelta(seconds=timeout_secs)
        )

    def allocate(self, nbytes: int, pool: BufferPool) -> torch.Tensor:
        return pool.take(nbytes)

    def receive(
        self,
        parts: Sequence[torch.Tensor],
        on_complete: Callable[[int], None],
        posted: Callable[[], None],
        timeout_secs: float,
    ) -> None:
        options = _broadcast_options(timeout_secs)
        works = [self._group.broadcast([part], options) for part in parts[:1]]
        # A model has hundreds of tensors, so the peer may start while the others are posted.
        posted()
        works += [self._group.broadcast([part], options) for part in parts[1:]]
        for count, work in enumerate(works, start=1):
            work.wait()
            on_complete(count)

    def send(
        self,
        parts: Sequence[torch.Tensor],
        on_complete: Callable[[int], None],
        timeout_secs: float,
    ) -> None:
        self.receive(parts, on_complete, lambda: None, timeout_secs)

    def abort(self) -> None:
        """Does nothing: abort() and shutdown() of gloo have no effect (note:weight-sync 0.1)."""


class NcclBackend:
    """Receives into GPU memory. An abort from another thread ends a blocked receive.

    Trainers build the communicator either when they join or with their first broadcast, and this
    side can't detect which: it builds its communicator in a separate thread, which fits both.
    """

    backend = NCCL

    def __init__(self, rendezvous: Rendezvous, store: Store) -> None:
        import torch
        from torch.distributed import ProcessGroupNCCL

        for key, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        store.set_timeout(timedelta(seconds=FIRST_BROADCAST_SECS))
        options = ProcessGroupNCCL.Options()
        # torch's timeout would end more than the group, so the monitor's has to be earlier.
        options._timeout = timedelta(seconds=2 * rendezvous.timeout_s + 60)
        self._device = torch.device("cuda", rendezvous.device)
        self._group: Any = ProcessGroupNCCL(store, rendezvous.rank, rendezvous.world_size, options)
        group, device = self._group, self._device
        self._connecting: BlockingCall[None] = BlockingCall(
            f"weights-connect-{rendezvous.group_name}",
            lambda _: group.eager_connect_single_device(device),
        )

    def allocate(self, nbytes: int, pool: BufferPool) -> torch.Tensor:
        import torch

        free, _ = torch.cuda.mem_get_info(self._device)
        if nbytes > free:
            raise out_of_memory_error(nbytes, free)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def receive(
        self,
        parts: Sequence[torch.Tensor],
        on_complete: Callable[[int], None],
        posted: Callable[[], None],
        timeout_secs: float,
    ) -> None:
        import torch

        # Before connecting: a trainer that connects with its first broadcast waits for `posted`.
        posted()
        self._wait_connected(timeout_secs)
        with torch.cuda.device(self._device):
            if all(part.device.type == "cuda" for part in parts):
                self._receive_on_gpu(parts, on_complete, timeout_secs)
            else:
                self._copy_through_gpu(parts, on_complete, timeout_secs, sends=False)

    def send(
        self,
        parts: Sequence[torch.Tensor],
        on_complete: Callable[[int], None],
        timeout_secs: float,
    ) -> None:
        import torch

        self._wait_connected(timeout_secs)
        with torch.cuda.device(self._device):
            self._copy_through_gpu(parts, on_complete, timeout_secs, sends=True)

    def _wait_connected(self, timeout_secs: float) -> None:
        self._connecting.wait(timeout_secs)
        self._connecting.take_result()

    def _receive_on_gpu(
        self,
        parts: Sequence[torch.Tensor],
        on_complete: Callable[[int], None],
        timeout_secs: float,
    ) -> None:
        import torch

        options = _broadcast_options(timeout_secs)
        works = [self._group.broadcast([part], options) for part in parts]
        for count, work in enumerate(works, start=1):
            work.wait()  # blocks the CUDA stream, not this thread
            torch.cuda.current_stream().synchronize()
            on_complete(count)

    def _copy_through_gpu(
        self,
        parts: Sequence[torch.Tensor],
        on_complete: Callable[[int], None],
        timeout_secs: float,
        *,
        sends: bool,
    ) -> None:
        """Transfers host memory, one message after another, through a bounce buffer on the GPU."""
        import torch

        options = _broadcast_options(timeout_secs)
        size = max((part.numel() for part in parts), default=0)
        bounce = torch.empty(size, dtype=torch.uint8, device=self._device)
        for count, part in enumerate(parts, start=1):
            view = bounce[: part.numel()]
            # A receive also copies here: the sentinels have to be in the bounce buffer.
            view.copy_(part)
            self._group.broadcast([view], options).wait()
            if not sends:
                part.copy_(view)
            torch.cuda.current_stream().synchronize()
            on_complete(count)

    def abort(self) -> None:
        self._group.abort()


def _broadcast_options(timeout_secs: float) -> BroadcastOptions:
    from torch.distributed.distributed_c10d import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = SOURCE_RANK
    options.timeout = timedelta(seconds=timeout_secs)
    return options


def error_summary(error: RuntimeError) -> str:
    """The message of a torch error without source location, hints and stack."""
    first, *_ = str(error).splitlines() or [type(error).__name__]
    first, _, _ = first.partition(" This is typically caused by")
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", first)
