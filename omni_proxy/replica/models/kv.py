"""The keys and values of one sequence, for every layer: what its next tokens attend to.

Invariant: rows below `length` are whole in every layer; rows at or above it mean nothing.
A sequence never shares memory with another one. The last position that fits is `limit - 1`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PAGE_TOKENS = 64


class ContextFull(ValueError):
    """The tokens do not fit in what the model can look back on; the text names the limit."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of one token's keys and values, and how many tokens there may be."""

    layers: int
    kv_heads: int
    head_size: int
    limit: int


class SequenceKV:
    """Grows as tokens are appended; one thread at a time may use it."""

    __slots__ = ("_layers", "_store", "length", "shape")

    def __init__(self, shape: KVShape, like: Tensor, tokens: int = 0) -> None:
        """Hold nothing yet, but room for `tokens` tokens; type and device are those of `like`."""
        self.shape = shape
        self.length = 0
        self._hold(self._room(tokens, like))

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, room for tokens to come included."""
        return self._store.nbytes

    @property
    def capacity(self) -> int:
        return self._store.shape[3]

    def reserve(self, count: int) -> None:
        """Make room for `count` more tokens; raises ContextFull, and then nothing has changed."""
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
        """Put `rows`, [count, 2, kv_heads, head_size], after the tokens held.

        Returns the layer's keys and values, each [kv_heads, length + count, head_size]. The
        tokens count only once `length` is moved, after the last layer.
        """
        end = self.length + rows.shape[0]
        held = self._layers[layer][:, :, :end]
        held[:, :, self.length :] = rows.permute(1, 2, 0, 3)
        keys, values = held.unbind(0)
        return keys, values

    def fork(self, length: int) -> SequenceKV:
        """Return a copy of the first `length` tokens that lives on its own.

        Raises ValueError where fewer are held.
        """
        self._check(length)
        copy = SequenceKV(self.shape, self._store, length)
        copy._store[:, :, :, :length] = self._store[:, :, :, :length]
        copy.length = length
        return copy

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`; the memory is kept for those to come."""
        self._check(length)
        self.length = length

    def _check(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"{length} tokens of a sequence that holds {self.length}")

    def _room(self, tokens: int, like: Tensor) -> Tensor:
        # One page more than asked: a copied prefix is mostly about to be continued.
        pages = tokens // PAGE_TOKENS + 1
        shape = self.shape
        capacity = min(pages * PAGE_TOKENS, shape.limit)
        return like.new_empty((shape.layers, 2, shape.kv_heads, capacity, shape.head_size))

    def _hold(self, store: Tensor) -> None:
        self._store = store
        self._layers = store.unbind(0)  # indexing a tensor anew costs 1.5 us per layer and token
