"""Llama: one forward pass over sequences of any lengths, weights under Hugging Face names.

Invariant: `named_parameters` has the names and shapes of a tied Hugging Face Llama, and in-place
writes to them take effect immediately: q/k/v and gate/up are rows of one joined tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from omni_proxy.replica.models.kv import KVShape, SequenceKV

BatchPart = tuple[Sequence[int], SequenceKV]

TIED_NAMES = {"lm_head.weight": "model.embed_tokens.weight"}

# For few tokens and a large weight, reading the weight dominates the time.
FEW_TOKENS = 5
LARGE_WEIGHT = 1 << 18
CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The sizes, under the names of a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is not an even multiple of "
                f"{self.num_attention_heads} attention heads"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key-value heads evenly"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Weight(nn.Module):
    """A module with only a `weight`, not initialized: a model fills it from a file or a seed."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)


def split_rows(joined: Tensor, sizes: Sequence[int]) -> list[Weight]:
    return [Weight(rows) for rows in torch.split(joined, list(sizes))]


def rejoin(weights: Sequence[Weight]) -> Tensor:
    """Join the weights as rows of one new tensor again, after each was moved separately."""
    joined = torch.cat([weight.weight.data for weight in weights])
    sizes = [len(weight.weight) for weight in weights]
    for weight, rows in zip(weights, torch.split(joined, sizes), strict=True):
        weight.weight.data = rows
    return joined


@cache
def needs_left_operand() -> bool:
    """Whether the matrix library reads a weight faster as the left operand.

    It does on an AMD EPYC. On Intel's CPUs the plain form takes less than half the time.
    """
    try:
        return "GenuineIntel" not in CPU_FACTS.read_text()
    except OSError:
        return True


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Map [tokens, in] by a weight [out, in] to [tokens, out], like `functional.linear`."""
    tokens = len(x)
    reading_dominates = tokens <= FEW_TOKENS and weight.numel() >= LARGE_WEIGHT
    if not (reading_dominates and needs_left_operand()):
        return functional.linear(x, weight)
    # With the weight as the left operand, the library reads it at full speed. That needs at least
    # two columns: a single token is duplicated.
    columns = (x if tokens > 1 else torch.cat((x, x))).t()
    return torch.mm(weight, columns)[:, :tokens].t().contiguous()


def rotary_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Rotary embeddings: cosines and signed sines of every position, each [context, head_size].

    A head's first half is rotated against its second ("rotate half"), so the sines of the first
    half are negated.
    """
    size = config.head_size
    steps = config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float64) / -size)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * steps
    cosines, sines = angles.cos().float(), angles.sin().float()
    return torch.cat((cosines, cosines), dim=1), torch.cat((-sines, sines), dim=1)


def rotate_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotate [tokens, heads, head_size] by the angles [tokens, 1, head_size], in place."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cosines).addcmul_(swapped, sines)


def causal_mask(past: int, count: int, device: torch.device) -> Tensor | None:
    """Mask of the tokens that each of `count` new tokens attends to, bool [count, past + count].

    None if no mask is needed: a single new token attends to all, and without past tokens the
    kernel's causal mode is used.
    """
    if count == 1 or past == 0:
        return None
    seen = torch.ones((count, past + count), dtype=torch.bool, device=device)
    return seen.tril(diagonal=past)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's new tokens in the flat batch, and its attention mask."""

    start: int
    stop: int
    kv: SequenceKV
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The new tokens of all sequences in one row; `rotary` holds their cosines and sines."""

    tokens: Tensor
    rotary: tuple[Tensor, Tensor]
    spans: tuple[Span, ...]


class Attention(nn.Module):
    """Grouped-query attention of each sequence's new tokens to its own tokens."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size, hidden = config.head_size, config.hidden_size
        kv_size = self.kv_heads * self.head_size
        self.joined = torch.empty(hidden + 2 * kv_size, hidden)
        self.q_proj, self.k_proj, self.v_proj = split_rows(self.joined, (hidden, kv_size, kv_size))
        self.o_proj = Weight(torch.empty(hidden, hidden))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Attention:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.joined = rejoin((self.q_proj, self.k_proj, self.v_proj))
        return self

    def forward(self, x: Tensor, layer: int, batch: Batch) -> Tensor:
        """Map [tokens, hidden] to [tokens, hidden]; append keys and values to each span's KV."""
        joined = project(x, self.joined).view(len(x), -1, self.head_size)
        turned = self.heads + self.kv_heads
        rotate_(joined[:, :turned], *batch.rotary)
        out = x.new_empty((len(x), self.heads, self.head_size))
        for span in batch.spans:
            rows = joined[span.start : span.stop]
            kv_rows = rows[:, self.heads :].view(len(rows), 2, self.kv_heads, -1)
            keys, values = span.kv.write(layer, kv_rows)
            out[span.start : span.stop] = self._attend(
                rows[:, : self.heads], keys, values, span.mask
            )
        return project(out.view(len(x), -1), self.o_proj.weight)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        if len(queries) == 1:
            # Treat the heads that share keys like several tokens: no key is copied or read twice.
            grouped = queries.view(1, self.kv_heads, -1, self.head_size)
            seen = functional.scaled_dot_product_attention(grouped, keys[None], values[None])
            return seen.view(1, self.heads, self.head_size)
        seen = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return seen[0].transpose(0, 1)


class MLP(nn.Module):
    """The SwiGLU feed-forward network of a layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        inner, hidden = config.intermediate_size, config.hidden_size
        self.joined = torch.empty(2 * inner, hidden)
        self.gate_proj, self.up_proj = split_rows(self.joined, (inner, inner))
        self.down_proj = Weight(torch.empty(hidden, inner))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MLP:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.joined = rejoin((self.gate_proj, self.up_proj))
        return self

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.joined).chunk(2, dim=-1)
        return project(functional.silu(gate).mul_(up), self.down_proj.weight)


class Norm(Weight):
    """RMSNorm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(torch.empty(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), layer, batch)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = Weight(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config)

    def forward(self, batch: Batch) -> Tensor:
        x = functional.embedding(batch.tokens, self.embed_tokens.weight)
        for number, layer in enumerate(self.layers):
            x = layer(x, number, batch)
        return x


class Llama(nn.Module):
    """The model; input and output embeddings are tied."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self._rotary = rotary_tables(config)

    def new_kv(self) -> SequenceKV:
        config = self.config
        shape = KVShape(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_size=config.head_size,
            limit=config.max_position_embeddings,
        )
        return SequenceKV(shape, like=self.model.embed_tokens.weight.data)

    def forward(self, parts: Sequence[BatchPart], *, all_positions: bool = False) -> Tensor:
        """Append each part's tokens to its KV and return logits.

        The logits are those of each part's last token, [len(parts), vocab]; with `all_positions`,
        those of all tokens, [tokens, vocab], in the order of the parts. Raises ContextFull if a
        part does not fit, and ValueError for a part without tokens, a token outside the vocabulary
        or a KV in two parts; then no KV has changed.
        """
        with torch.inference_mode():
            batch = self._batch(parts)
            x = self.model(batch)
            for span in batch.spans:
                span.kv.length += span.stop - span.start
            if not all_positions and len(x) > len(parts):
                x = x[[span.stop - 1 for span in batch.spans]]
            logits = project(self.model.norm(x), self.model.embed_tokens.weight)
        return logits.clone()  # inference tensors cannot be changed in place outside inference mode

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """Return [len(tokens), hidden], the rows after the last norm; raises as `forward` does."""
        with torch.inference_mode():
            rows: Tensor = self.model.norm(self.model(self._batch([(tokens, self.new_kv())])))
        return rows.clone()

    def _batch(self, parts: Sequence[BatchPart]) -> Batch:
        flat, positions = self._checked(parts)
        embedding = self.model.embed_tokens.weight
        spans, start = [], 0
        for tokens, kv in parts:
            kv.reserve(len(tokens))
            mask = causal_mask(kv.length, len(tokens), embedding.device)
            spans.append(Span(start, start + len(tokens), kv, mask))
            start += len(tokens)
        if self._rotary[0].device != embedding.device or self._rotary[0].dtype != embedding.dtype:
            self._rotary = (self._rotary[0].to(embedding), self._rotary[1].to(embedding))
        rows = torch.tensor(positions, device=embedding.device)
        cosines, sines = (table[rows].unsqueeze(1) for table in self._rotary)
        flat_tensor = torch.tensor(flat, device=embedding.device)
        return Batch(flat_tensor, (cosines, sines), tuple(spans))

    def _checked(self, parts: Sequence[BatchPart]) -> tuple[list[int], list[int]]:
        flat: list[int] = []
        positions: list[int] = []
        for tokens, kv in parts:
            if not tokens:
                raise ValueError("a part of the batch has no token")
            flat.extend(tokens)
            positions.extend(range(kv.length, kv.length + len(tokens)))
        if not parts:
            raise ValueError("a batch without parts")
        if len({id(kv) for _, kv in parts}) < len(parts):
            raise ValueError("two parts of one batch append to the same KV")
        if min(flat) < 0 or max(flat) >= self.config.vocab_size:
            raise ValueError(
                f"token {min(flat) if min(flat) < 0 else max(flat)} is not in the vocabulary of "
                f"{self.config.vocab_size}"
            )
        return flat, positions
