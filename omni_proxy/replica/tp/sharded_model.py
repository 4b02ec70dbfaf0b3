"""What one rank holds of a text model: slices of the weights, layers that use them, and its KVs.

Invariant: every rank runs the same batches in the same order, and the activations between two
layers are the same at all ranks. Every rank holds embedding and norms; only the leader computes
logits. The leader sends forks, truncations and ends of KVs with the next step (`KVJournal`): after
that step, each KV that the leader holds has the same length at every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    Weight,
    split_rows,
)
from omni_proxy.replica.models.shard import Shard
from omni_proxy.replica.models.text_model import ModelWorker, TextModel
from omni_proxy.replica.tp.group import RankGroup

# Makes the tensor the sum of the ranks' tensors, in place at every rank, and returns it.
Sum = Callable[[Tensor], Tensor]

NamedTensor = tuple[str, Tensor]

# Slices of one rank that are gathered by one operation: each has a fixed cost besides the copying.
GATHER_BYTES = 1 << 20


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
        for module in self.model.layers:
            layer = cast("Layer", module)
            layer.self_attn = ShardedAttention(shard, add_up)
            layer.mlp = ShardedMLP(shard, add_up)
        values = dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(shard.shard_of(name, values[name]))

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
            size = tensor.nbytes if self.model.shard.slice_of(name) is not None else 0
            if nbytes and nbytes + size > GATHER_BYTES:
                yield group
                group, nbytes = [], 0
            group.append((name, tensor))
            nbytes += size
        yield group

    def _gathered(self, group: Sequence[NamedTensor]) -> dict[str, Tensor]:
        """The whole tensors at rank 0, else none; raises RankLost."""
        shard = self.model.shard
        slices = {name: tensor for name, tensor in group if shard.slice_of(name) is not None}
        parts = self.group.gather(list(slices.values())) if slices else []
        if self.tp_rank:
            return {}
        parts_by_name = zip(slices, parts, strict=True)
        return dict(group) | {
            name: shard.gather(name, rank_parts) for name, rank_parts in parts_by_name
        }


FORK, TRUNCATE, FREE = "fork", "truncate", "free"
Entry = Sequence[Any]  # one of the three operations, then the number of the KV


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
        self._kvs: dict[int, SequenceKV] = {}

    def __len__(self) -> int:
        return len(self._kvs)

    def apply(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            match entry:
                case (str(word), int(copy), int(number), int(length)) if word == FORK:
                    self._kvs[copy] = self.kv(number).fork(length)
                case (str(word), int(number), int(length)) if word == TRUNCATE:
                    self.kv(number).truncate(length)
                case (str(word), int(number)) if word == FREE:
                    self._kvs.pop(number, None)
                case _:
                    raise ValueError(f"invalid journal entry from the leader: {entry!r}")

    def kv(self, number: int) -> SequenceKV:
        if number not in self._kvs:
            self._kvs[number] = self._new_kv()
        return self._kvs[number]
