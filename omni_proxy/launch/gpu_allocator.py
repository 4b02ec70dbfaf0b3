"""The GPUs of this machine, lent to launched replicas: none is ever lent twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


class TooFewGpus(Exception):
    """More were asked for than are free."""


class GpuAllocator:
    def __init__(self, names: Iterable[str]) -> None:
        self._all = list(names)
        self._lent: set[str] = set()

    def take(self, count: int) -> tuple[str, ...]:
        free = [name for name in self._all if name not in self._lent]
        if len(free) < count:
            raise TooFewGpus(
                f"it needs {count} GPUs and {len(free)} of {len(self._all)} are free: lower "
                "gpus_per_replica or replicas, or widen CUDA_VISIBLE_DEVICES"
            )
        taken = tuple(free[:count])
        self._lent.update(taken)
        return taken

    def give_back(self, names: Iterable[str]) -> None:
        self._lent.difference_update(names)


def visible(environ: Mapping[str, str]) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES: those it holds already, else one number per NVIDIA device."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
