"""The address and size of a process group, validated before anything is opened.

Pure. Backends do not detect a wrong or duplicate rank: the group then never forms, or forms and
hangs (weight-sync.md 0.7). So the numbers are validated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_proxy.process_group.tensor_plan import GroupError

GLOO: Final = "gloo"
NCCL: Final = "nccl"
MAX_TIMEOUT_SECS: Final = 1e9  # some clocks cannot represent more


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address of a trainer's group and this rank's place in it (two-phase.md 1.2).

    Rank 0 is the trainer. `timeout_s` bounds only joining; `device` is the CUDA index of an NCCL
    group's GPU: no two ranks of a group may share one.
    """

    master_address: str
    master_port: int | str
    rank: int
    world_size: int
    group_name: str
    backend: str = NCCL
    timeout_s: float = 300.0
    device: int = 0


@dataclass(frozen=True, slots=True)
class HostedRendezvous:
    """A group of which this process is rank 0 and holds the store, on `host` only.

    Port 0 picks a free one. `timeout_s` bounds joining and, later, each send.
    """

    host: str
    world_size: int
    group_name: str
    backend: str = GLOO
    port: int = 0
    timeout_s: float = 300.0


def validated_address(rendezvous: Rendezvous) -> tuple[str, int]:
    """The master's host and port; raises GroupError on values that would hang. Opens nothing."""
    name, backend = rendezvous.group_name, rendezvous.backend
    if not isinstance(name, str) or not name:
        raise GroupError(f"group_name must be a non-empty string, not {name!r}")
    if backend not in (GLOO, NCCL):
        raise GroupError(f"unknown backend {backend!r}: gloo and nccl are the known ones")
    rank, world = rendezvous.rank, rendezvous.world_size
    for key, number in (("rank", rank), ("world_size", world)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise GroupError(f"{key} must be an integer, not {number!r}")
    if world < 2:
        raise GroupError(f"world_size {world}: the trainer and one receiver make at least 2")
    if not 1 <= rank < world:
        raise GroupError(
            f"rank {rank} does not fit a group of {world}: rank 0 is the trainer, so ours must be "
            f"1 to {world - 1} (rank = rank_offset + tensor-parallel rank)"
        )
    if not 0 < rendezvous.timeout_s <= MAX_TIMEOUT_SECS:
        raise GroupError(
            f"timeout {rendezvous.timeout_s!r}: it must be a positive number of seconds, at most "
            f"{MAX_TIMEOUT_SECS:g}"
        )
    return _host(rendezvous.master_address), _port(rendezvous.master_port)


def _host(address: object) -> str:
    if not isinstance(address, str) or not address.strip():
        raise GroupError(f"master_address must be the trainer's host, not {address!r}")
    host = address.strip()
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _port(port: object) -> int:
    if isinstance(port, str) and port.strip().isascii() and port.strip().isdigit():
        port = int(port)
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise GroupError(f"master_port must be a port from 1 to 65535, not {port!r}")
    return port
