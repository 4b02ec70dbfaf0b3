"""Tensors in buckets: how each bucket is announced, and the messages that carry it.

A new bucket begins if the next tensor would make the current one too large; a tensor above the
bucket size has its own bucket (note:two-phase 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

FLATTENED = "flattened_bucket"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of the model; `shapes` are the announced shapes."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """The three parallel lists of a request."""
        dtypes = [str(each.dtype).removeprefix("torch.") for each in self.tensors]
        shapes = [list(shape) for shape in self.shapes]
        return {"names": list(self.names), "dtypes": dtypes, "shapes": shapes}

    def messages(self, load_format: str | None) -> list[torch.Tensor]:
        """One message per tensor; if flattened, one of all their bytes, without padding."""
        if load_format != FLATTENED:
            return list(self.tensors)
        parts = [each.contiguous().reshape(-1).view(torch.uint8) for each in self.tensors]
        return [torch.cat(parts)]

    def filed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies for a file, with the announced shapes."""
        for name, tensor, shape in zip(self.names, self.tensors, self.shapes, strict=True):
            same = tuple(tensor.shape) == shape
            yield name, tensor.clone() if same else tensor.new_zeros(shape)

    def misshapen(self) -> Bucket:
        """The bucket with its first tensor announced with one row too many."""
        first, *others = self.shapes
        rows, *rest = first
        return replace(self, shapes=((rows + 1, *rest), *others))


def buckets_of(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> list[Bucket]:
    """Divide all tensors, in their order, into buckets."""
    gathered: list[list[str]] = []
    filled = 0
    for name, tensor in tensors.items():
        if not gathered or filled + tensor.nbytes > bucket_bytes:
            gathered.append([])
            filled = 0
        gathered[-1].append(name)
        filled += tensor.nbytes
    return [_bucket(names, tensors) for names in gathered]


def _bucket(names: list[str], tensors: Mapping[str, torch.Tensor]) -> Bucket:
    found = tuple(tensors[name] for name in names)
    return Bucket(tuple(names), found, tuple(tuple(each.shape) for each in found))
