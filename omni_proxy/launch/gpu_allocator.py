"""Assigns the GPUs of this machine to launched replicas.

Invariant: no GPU belongs to two replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


class TooFewGpus(Exception):
    """More GPUs were requested than are free."""


class GpuAllocator:
    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._allocated: set[str] = set()

    def allocate(self, count: int) -> tuple[str, ...]:
        """The names of `count` free GPUs. Raises TooFewGpus."""
        free = [name for name in self._names if name not in self._allocated]
        if len(free) < count:
            raise TooFewGpus(
                f"it needs {count} GPUs and {len(free)} of {len(self._names)} are free: lower "
                "gpus_per_replica or replicas, or widen CUDA_VISIBLE_DEVICES"
            )
        names = tuple(free[:count])
        self._allocated.update(names)
        return names

    def adopt(self, names: Iterable[str]) -> None:
        """Mark GPUs as allocated to a replica that was handed over."""
        self._allocated.update(names)

    def release(self, names: Iterable[str]) -> None:
        self._allocated.difference_update(names)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES; without it, the numbers of the NVIDIA devices."""
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        return [name.strip() for name in names.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
