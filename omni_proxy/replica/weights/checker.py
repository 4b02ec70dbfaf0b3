"""Checksums of a model's weights: one digest per tensor, and one of all (note:api-server 3).

Invariant: the live tensors' bytes are hashed in place, without a copy if they are in host memory. A
snapshot holds digests, not tensors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from omni_proxy.process_group.broadcast.tensor_hashing import roll_up, tensor_digest
from omni_proxy.replica.weights.live_tensors import LiveTensors, WeightsError

ACTIONS = ("snapshot", "reset_tensors", "compare", "checksum")
NO_SNAPSHOT = "weights_checker compare requires snapshot first"

Metadata = dict[str, dict[str, Any]]


def digest_of(name: str, tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().data
    return tensor_digest(name, str(tensor.dtype), tensor.shape, data)


def metadata_of(target: LiveTensors) -> Metadata:
    """Name, shape, dtype and digest of each tensor, hashed on all cores."""
    tensors = dict(target)
    # The largest first, so that all cores finish at about the same time.
    order = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores, thread_name_prefix="checksum") as pool:
        digests = dict(zip(order, pool.map(lambda n: digest_of(n, tensors[n]), order), strict=True))
    return {
        name: {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "sha256": digests[name],
        }
        for name, tensor in tensors.items()
    }


Tensors = Iterable[tuple[str, Tensor]]


def one_group(tensors: Tensors) -> Iterator[dict[str, Tensor]]:
    yield dict(tensors)


class WeightsChecker:
    """Runs the actions of the route `weights_checker` on one rank.

    `layout` is part of every result: it describes the part of each tensor that this rank holds.
    `whole_tensors` yields the whole tensors, in groups, at rank 0; other ranks report no
    `full_checksum`. See `ModelWorker.whole_tensors`.
    """

    def __init__(
        self,
        target: LiveTensors,
        layout: dict[str, int],
        whole_tensors: Callable[[Tensors], Iterator[dict[str, Tensor]]] = one_group,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._layout = layout
        self._whole_tensors = whole_tensors
        self._clock = clock
        self._snapshot: Metadata | None = None

    def require(self, action: str) -> None:
        """Raises WeightsError for an action that is unknown or not possible now."""
        if action not in ACTIONS:
            *most, last = ACTIONS
            raise WeightsError(
                f"Unsupported weights_checker action {action!r}; "
                f"expected {', '.join(most)}, or {last}"
            )
        if action == "compare" and self._snapshot is None:
            raise WeightsError(NO_SNAPSHOT)

    def check(self, action: str) -> dict[str, Any]:
        """Hash all tensors and return the result's `data`; raises WeightsError, like `require`."""
        self.require(action)
        started_s = self._clock()
        metadata = metadata_of(self._target)
        checksums = {name: entry["sha256"] for name, entry in metadata.items()}
        data: dict[str, Any] = {
            "action": action,
            "tensor_count": len(metadata),
            "checksums": checksums,
            "tensor_metadata": metadata,
            "per_gpu_checksum": roll_up(checksums),
            "full_checksum": self._full_checksum(checksums),
            "layout": dict(self._layout),
        }
        if action == "compare":
            data |= _difference(self._snapshot or {}, metadata)
        elif action != "checksum":
            self._snapshot = metadata
        return data | {"elapsed_s": self._clock() - started_s}

    def _full_checksum(self, checksums: dict[str, str]) -> str | None:
        """The digest over whole tensors."""
        local, full = dict(self._target), {}
        for group in self._whole_tensors(self._target):
            for name, whole in group.items():
                is_local = whole is local[name]
                full[name] = checksums[name] if is_local else digest_of(name, whole)
        return None if self._layout["rank"] else roll_up(full)


def _difference(before: Metadata, now: Metadata) -> dict[str, Any]:
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    missing, unexpected = sorted(before.keys() - now.keys()), sorted(now.keys() - before.keys())
    return {
        "matched": not (changed or missing or unexpected),
        "missing": missing,
        "unexpected": unexpected,
        "changed": changed,
    }
