"""Where a weights-update group meets, and the arithmetic that must hold before anything is opened.

Pure. A rank that is wrong or taken twice is not noticed by the backends: the group then never
forms, or forms and hangs (weight-sync.md 0.7). So the numbers are checked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_proxy.process_group.tensor_plan import GroupError

GLOO: Final = "gloo"
NCCL: Final = "nccl"
MOST_SECS: Final = 1e9  # more than this some clock could not count


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a group meets and who we are in it (two-phase.md 1.2); rank 0 is the trainer.

    `timeout_s` bounds the meeting alone; `device` is the GPU of an NCCL group, as this process
    counts them: no two ranks of a group may share one.
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
class Meeting:
    """A group that is ours: we are rank 0 and keep its store, on `host` only; port 0 = a free one.

    `timeout_s` bounds the meeting and, later, each send.
    """

    host: str
    world_size: int
    group_name: str
    backend: str = GLOO
    port: int = 0
    timeout_s: float = 300.0


def checked(rendezvous: Rendezvous) -> tuple[str, int]:
    """Host and port; raises GroupError on numbers that could only hang. Opens nothing."""
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
    if not 0 < rendezvous.timeout_s <= MOST_SECS:
        raise GroupError(
            f"timeout {rendezvous.timeout_s!r}: it must be a positive number of seconds, at most "
            f"{MOST_SECS:g}"
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
