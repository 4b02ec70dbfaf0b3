"""The slice of each tensor of a Llama that one rank holds, if several ranks share the model.

Invariant: the ranks' slices of a tensor, joined by `gather`, are that tensor. Attention heads are
never split; with more ranks than key-value heads, neighbouring ranks hold the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from omni_proxy.replica.models.llama import LlamaConfig

ROWS, COLUMNS = 0, 1  # of a weight [out, in]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows or columns `start` to `stop` of a whole tensor that has `length` of them."""

    dim: int
    start: int
    stop: int
    length: int


def sizes_for(config: LlamaConfig) -> list[int]:
    """The numbers of processes that this model can be split over, including 1."""
    return [size for size in range(1, config.num_attention_heads + 1) if _divides(config, size)]


def _divides(config: LlamaConfig, size: int) -> bool:
    kv_heads = config.num_key_value_heads
    return (
        config.num_attention_heads % size == 0
        and config.intermediate_size % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    )


def _join_with_or(sizes: list[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True, slots=True)
class Shard:
    """The slices of rank `rank` of `size`; raises ValueError if the model can't be split so."""

    config: LlamaConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        config = self.config
        if self.size < 1 or not _divides(config, self.size):
            raise ValueError(
                f"--tp {self.size} does not divide this model: its "
                f"{config.num_attention_heads} attention heads, {config.num_key_value_heads} "
                f"key-value heads and inner size of {config.intermediate_size} can be split over "
                f"{_join_with_or(sizes_for(config))} processes"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size} ranks")

    @property
    def heads(self) -> range:
        return _rank_range(self.config.num_attention_heads, self.rank, self.size)

    @property
    def kv_heads(self) -> range:
        """The key-value heads that the rank's attention heads use."""
        return _rank_range(self.config.num_key_value_heads, self.rank, self.size)

    @property
    def inner(self) -> range:
        """The rank's part of the features between gate/up and down."""
        return _rank_range(self.config.intermediate_size, self.rank, self.size)

    def slice_of(self, name: str) -> TensorSlice | None:
        """This rank's slice of the tensor of this name; None means all of it."""
        config, words = self.config, name.split(".")
        layer_part = words[-2] if len(words) > 2 and words[-1] == "weight" else ""
        match layer_part:
            case "q_proj":
                return _slice_in_units(
                    ROWS, self.heads, config.num_attention_heads, config.head_size
                )
            case "k_proj" | "v_proj":
                return _slice_in_units(
                    ROWS, self.kv_heads, config.num_key_value_heads, config.head_size
                )
            case "o_proj":
                return _slice_in_units(
                    COLUMNS, self.heads, config.num_attention_heads, config.head_size
                )
            case "gate_proj" | "up_proj":
                return _slice_in_units(ROWS, self.inner, config.intermediate_size, 1)
            case "down_proj":
                return _slice_in_units(COLUMNS, self.inner, config.intermediate_size, 1)
        return None

    def shard_of(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's slice of a whole tensor, without a copy."""
        own = self.slice_of(name)
        return tensor if own is None else tensor.narrow(own.dim, own.start, own.stop - own.start)

    def whole_shape(self, name: str, own_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor whose slice at this rank has `own_shape`."""
        own, shape = self.slice_of(name), list(own_shape)
        if own is not None:
            shape[own.dim] = own.length
        return tuple(shape)

    def gather(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Join all ranks' slices, in the order of the ranks, into the whole tensor."""
        if self.slice_of(name) is None:
            return parts[self.rank]
        whole = parts[0].new_empty(self.whole_shape(name, parts[0].shape))
        for rank, part in enumerate(parts):
            Shard(self.config, rank, self.size).shard_of(name, whole).copy_(part)
        return whole


def _rank_range(count: int, rank: int, size: int) -> range:
    start = rank * count // size
    return range(start, start + max(1, count // size))


def _slice_in_units(dim: int, units: range, unit_count: int, unit_size: int) -> TensorSlice:
    return TensorSlice(dim, units.start * unit_size, units.stop * unit_size, unit_count * unit_size)
