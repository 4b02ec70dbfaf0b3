"""The part of a text model that one rank holds: weight slices, layers, a mirror of the KV caches.

Invariant: the ranks' slices of a tensor, joined by `gather`, are that tensor. Attention heads are
never split; with more ranks than key-value heads, neighbouring ranks hold the same one. Every rank
runs the same batches in the same order, and the activations between two layers are the same at all
ranks. Every rank holds embedding and norms; only the leader computes logits. The leader sends
forks, truncations and ends of KVs with the next step (`KVJournal`); after it, each KV that the
leader holds has the same length at every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from omni_proxy.replica.models.kv import KVShape, SequenceKV
from omni_proxy.replica.models.llama import (
    MLP,
    Attention,
    Batch,
    BatchPart,
    Layer,
    Llama,
    LlamaConfig,
    Weight,
    split_rows,
)
from omni_proxy.replica.models.text_model import ModelWorker, TextModel
from omni_proxy.replica.tp.group import RankGroup

# Makes the tensor the sum of the ranks' tensors, in place at every rank, and returns it.
Sum = Callable[[Tensor], Tensor]

NamedTensor = tuple[str, Tensor]

# Slices of one rank that are gathered by one operation: each takes some 0.2 ms besides the copying.
GATHER_BYTES = 1 << 20
ROWS, COLUMNS = 0, 1  # of a weight [out, in]
FORK, TRUNCATE, FREE = "fork", "truncate", "free"
Entry = Sequence[Any]  # one of the three operations, then the number of the KV


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


def _either(sizes: list[int]) -> str:
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
                f"{_either(sizes_for(config))} processes"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size} ranks")

    @property
    def heads(self) -> range:
        return _share(self.config.num_attention_heads, self.rank, self.size)

    @property
    def kv_heads(self) -> range:
        """The key-value heads that the rank's attention heads use."""
        return _share(self.config.num_key_value_heads, self.rank, self.size)

    @property
    def inner(self) -> range:
        """The rank's part of the features between gate/up and down."""
        return _share(self.config.intermediate_size, self.rank, self.size)

    def cut(self, name: str) -> TensorSlice | None:
        """This rank's slice of the tensor of this name; None means all of it."""
        config, words = self.config, name.split(".")
        layer_part = words[-2] if len(words) > 2 and words[-1] == "weight" else ""
        match layer_part:
            case "q_proj":
                return _scaled(ROWS, self.heads, config.num_attention_heads, config.head_size)
            case "k_proj" | "v_proj":
                return _scaled(ROWS, self.kv_heads, config.num_key_value_heads, config.head_size)
            case "o_proj":
                return _scaled(COLUMNS, self.heads, config.num_attention_heads, config.head_size)
            case "gate_proj" | "up_proj":
                return _scaled(ROWS, self.inner, config.intermediate_size, 1)
            case "down_proj":
                return _scaled(COLUMNS, self.inner, config.intermediate_size, 1)
        return None

    def shard_of(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's slice of a whole tensor, without a copy."""
        cut = self.cut(name)
        return tensor if cut is None else tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)

    def whole_shape(self, name: str, held: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor whose slice at this rank has the shape `held`."""
        cut, shape = self.cut(name), list(held)
        if cut is not None:
            shape[cut.dim] = cut.length
        return tuple(shape)

    def gather(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Join all ranks' slices, in the order of the ranks, into the whole tensor."""
        if self.cut(name) is None:
            return parts[self.rank]
        whole = parts[0].new_empty(self.whole_shape(name, parts[0].shape))
        for rank, part in enumerate(parts):
            Shard(self.config, rank, self.size).shard_of(name, whole).copy_(part)
        return whole


def _share(count: int, rank: int, size: int) -> range:
    start = rank * count // size
    return range(start, start + max(1, count // size))


def _scaled(dim: int, share: range, count: int, width: int) -> TensorSlice:
    return TensorSlice(dim, share.start * width, share.stop * width, count * width)


class ShardedAttention(Attention):
    """Some of the heads, and the columns of the output that belong to them."""

    def __init__(self, shard: Shard, add_up: Sum) -> None:
        super(Attention, self).__init__()
        hidden, self.head_size = shard.config.hidden_size, shard.config.head_size
        self.heads, self.kv_heads = len(shard.heads), len(shard.kv_heads)
        rows, kv_rows = self.heads * self.head_size, self.kv_heads * self.head_size
        self.joined = torch.empty(rows + 2 * kv_rows, hidden)
        self.q_proj, self.k_proj, self.v_proj = split_rows(self.joined, (rows, kv_rows, kv_rows))
        self.o_proj = Weight(torch.empty(hidden, rows))
        self._add_up = add_up

    def forward(self, x: Tensor, layer: int, batch: Batch) -> Tensor:
        return self._add_up(super().forward(x, layer, batch))


class ShardedMLP(MLP):
    """Some of the inner features, and the columns of the output that belong to them."""

    def __init__(self, shard: Shard, add_up: Sum) -> None:
        super(MLP, self).__init__()
        hidden, inner = shard.config.hidden_size, len(shard.inner)
        self.joined = torch.empty(2 * inner, hidden)
        self.gate_proj, self.up_proj = split_rows(self.joined, (inner, inner))
        self.down_proj = Weight(torch.empty(hidden, inner))
        self._add_up = add_up

    def forward(self, x: Tensor) -> Tensor:
        return self._add_up(super().forward(x))


class ShardedLlama(Llama):
    """One rank's part of `whole`, copied out of it."""

    def __init__(self, whole: Llama, shard: Shard, add_up: Sum) -> None:
        super().__init__(whole.config)
        self.shard = shard
        for each in self.model.layers:
            layer = cast("Layer", each)
            layer.self_attn = ShardedAttention(shard, add_up)
            layer.mlp = ShardedMLP(shard, add_up)
        values = dict(whole.named_parameters())
        with torch.no_grad():
            for name, held in self.named_parameters():
                held.copy_(shard.shard_of(name, values[name]))

    @property
    def kv_shape(self) -> KVShape:
        config = self.config
        return KVShape(
            layers=config.num_hidden_layers,
            kv_heads=len(self.shard.kv_heads),
            head_size=config.head_size,
            limit=config.max_position_embeddings,
        )

    def new_kv(self) -> SequenceKV:
        return SequenceKV(self.kv_shape, like=self.model.embed_tokens.weight.data)

    def follow(self, parts: Sequence[BatchPart]) -> None:
        """Append each part's tokens to its KV, as `forward` does, without making logits."""
        with torch.inference_mode():
            batch = self._batch(parts)
            self.model(batch)
        for span in batch.spans:
            span.kv.length += span.stop - span.start


class RankWorker(ModelWorker):
    """The worker of one rank; `text.model` must be a ShardedLlama."""

    def __init__(self, text: TextModel, group: RankGroup) -> None:
        super().__init__(text)
        self.group = group
        self.tp_rank, self.tp_size = group.rank, group.size

    @property
    def model(self) -> ShardedLlama:
        return cast("ShardedLlama", self.text.model)

    def whole_tensors(self, tensors: Iterable[NamedTensor]) -> Iterator[dict[str, Tensor]]:
        """As `ModelWorker.whole_tensors`; raises RankLost."""
        for group in self._groups(tensors):
            yield self._gathered(group)

    def _groups(self, tensors: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
        """The tensors in groups; the slices of a group have about GATHER_BYTES."""
        group: list[NamedTensor] = []
        nbytes = 0
        for name, tensor in tensors:
            size = tensor.nbytes if self.model.shard.cut(name) is not None else 0
            if nbytes and nbytes + size > GATHER_BYTES:
                yield group
                group, nbytes = [], 0
            group.append((name, tensor))
            nbytes += size
        yield group

    def _gathered(self, group: Sequence[NamedTensor]) -> dict[str, Tensor]:
        """The whole tensors at rank 0, else none; raises RankLost."""
        shard = self.model.shard
        slices = {name: tensor for name, tensor in group if shard.cut(name) is not None}
        parts = self.group.gather(list(slices.values())) if slices else []
        if self.tp_rank:
            return {}
        found = zip(slices, parts, strict=True)
        return dict(group) | {name: shard.gather(name, each) for name, each in found}


class KVJournal:
    """Changes of the leader's KVs since the last step; any thread may free a KV."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._numbers = count()

    def number(self) -> int:
        return next(self._numbers)

    def note(self, *entry: Any) -> None:
        self._entries.append(entry)

    def take(self) -> list[Entry]:
        return [self._entries.popleft() for _ in range(len(self._entries))]


class MirroredKV(SequenceKV):
    """The leader's part of a sequence's keys and values; it records changes in the journal."""

    __slots__ = ("_journal", "number")

    def __init__(self, shape: KVShape, like: Tensor, journal: KVJournal) -> None:
        super().__init__(shape, like)
        self.number = journal.number()
        self._journal = journal

    def fork(self, length: int) -> MirroredKV:
        plain = super().fork(length)
        copy = MirroredKV(self.shape, self._store, self._journal)
        copy._hold(plain._store)
        copy.length = length
        self._journal.note(FORK, copy.number, self.number, length)
        return copy

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._journal.note(TRUNCATE, self.number, length)

    def __del__(self) -> None:
        journal = getattr(self, "_journal", None)  # missing if the allocation in __init__ failed
        if journal is not None:
            journal.note(FREE, self.number)


class KVMirror:
    """A follower's part of the leader's KVs; a KV that is new at the leader starts empty."""

    def __init__(self, new_kv: Callable[[], SequenceKV]) -> None:
        self._new_kv = new_kv
        self._held: dict[int, SequenceKV] = {}

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            match entry:
                case (str(word), int(copy), int(number), int(length)) if word == FORK:
                    self._held[copy] = self.kv(number).fork(length)
                case (str(word), int(number), int(length)) if word == TRUNCATE:
                    self.kv(number).truncate(length)
                case (str(word), int(number)) if word == FREE:
                    self._held.pop(number, None)
                case _:
                    raise ValueError(f"invalid journal entry from the leader: {entry!r}")

    def kv(self, number: int) -> SequenceKV:
        if number not in self._held:
            self._held[number] = self._new_kv()
        return self._held[number]
