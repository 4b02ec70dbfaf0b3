"""KV cache of one sequence: keys and values of every layer, attended to by its next tokens.

Invariant: rows below `length` are valid in every layer; rows at or above it are undefined.
Sequences never share memory. The last possible position is `limit - 1`. A layer read from bytes
equals the layer that was written, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PAGE_TOKENS = 64


class ContextFull(ValueError):
    """The tokens do not fit in the model's context; the message has the limit."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of one token's keys and values, and the maximum number of tokens."""

    layers: int
    kv_heads: int
    head_size: int
    limit: int


class SequenceKV:
    """The keys and values of one sequence; grows as tokens are appended. Not thread-safe."""

    __slots__ = ("_layers", "_store", "length", "shape")

    def __init__(self, shape: KVShape, like: Tensor, tokens: int = 0) -> None:
        """Start empty, with room for `tokens` tokens; dtype and device are those of `like`."""
        self.shape = shape
        self.length = 0
        self._hold(self._room(tokens, like))

    @property
    def nbytes(self) -> int:
        """Bytes of allocated memory, including room for more tokens."""
        return self._store.nbytes

    @property
    def capacity(self) -> int:
        return self._store.shape[3]

    def layer(self, number: int) -> Tensor:
        """The memory of one layer: [2, kv_heads, capacity, head_size], keys and then values."""
        return self._layers[number]

    def reserve(self, count: int) -> None:
        """Make room for `count` more tokens; raises ContextFull, without any change."""
        needed = self.length + count
        if needed > self.shape.limit:
            raise ContextFull(
                f"{needed} tokens do not fit: the model's context is {self.shape.limit} tokens"
            )
        if needed <= self.capacity:
            return
        grown = self._room(max(needed, 2 * self.length), self._store)
        grown[:, :, :, : self.length] = self._store[:, :, :, : self.length]
        self._hold(grown)

    def write(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Write `rows`, [count, 2, kv_heads, head_size], after the stored tokens.

        Returns the layer's keys and values, each [kv_heads, length + count, head_size]. The tokens
        count only once `length` is advanced, after the last layer.
        """
        end = self.length + rows.shape[0]
        stored = self._layers[layer][:, :, :end]
        stored[:, :, self.length :] = rows.permute(1, 2, 0, 3)
        keys, values = stored.unbind(0)
        return keys, values

    def fork(self, length: int) -> SequenceKV:
        """Return an independent copy of the first `length` tokens.

        Raises ValueError if fewer are stored.
        """
        self._check(length)
        copy = SequenceKV(self.shape, self._store, length)
        copy._store[:, :, :, :length] = self._store[:, :, :, :length]
        copy.length = length
        return copy

    def truncate(self, length: int) -> None:
        """Drop all tokens except the first `length`; the memory is kept for new ones."""
        self._check(length)
        self.length = length

    def _check(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"{length} tokens requested, the sequence has {self.length}")

    def _room(self, tokens: int, like: Tensor) -> Tensor:
        # One page more than requested: a copied prefix is usually continued.
        pages = tokens // PAGE_TOKENS + 1
        shape = self.shape
        capacity = min(pages * PAGE_TOKENS, shape.limit)
        return like.new_empty((shape.layers, 2, shape.kv_heads, capacity, shape.head_size))

    def _hold(self, store: Tensor) -> None:
        self._store = store
        self._layers = store.unbind(
            0
        )  # only once: indexing the tensor for each layer and token would be slow


# KVs as bytes: nothing is converted.


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a tensor: its own memory if it is contiguous, else a copy."""
    array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def layer_of(kv: SequenceKV, layer: int, tokens: int) -> Tensor:
    """Copy the keys and values of the first `tokens` tokens: [2, kv_heads, tokens, head_size]."""
    return kv.layer(layer)[:, :, :tokens].clone(memory_format=torch.contiguous_format)


def layer_buffer(kv: SequenceKV, tokens: int) -> Tensor:
    """An uninitialized tensor of the shape that `layer_of` returns."""
    layer = kv.layer(0)
    return layer.new_empty((layer.shape[0], layer.shape[1], tokens, layer.shape[3]))


def layer_bytes(kv: SequenceKV, tokens: int) -> int:
    """Bytes of one layer's KV of `tokens` tokens."""
    shape = kv.shape
    return 2 * shape.kv_heads * tokens * shape.head_size * kv.layer(0).element_size()


def kv_bytes(kv: SequenceKV, tokens: int) -> int:
    """Bytes of the whole KV of `tokens` tokens."""
    return kv.shape.layers * layer_bytes(kv, tokens)


def put_layer(kv: SequenceKV, layer: int, rows: Tensor) -> None:
    """Write what `layer_of` returned; the tokens are used once `length` is advanced."""
    kv.layer(layer)[:, :, : rows.shape[2]] = rows
