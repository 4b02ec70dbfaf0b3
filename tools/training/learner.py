"""Fine-tuning for a few real steps: the model learns to answer one question with one sentence.

The model class is the replica's own, so that the weights have the replica's names and bytes; only
the forward pass with gradients is implemented here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from omni_proxy.process_group.broadcast.tensor_hashing import roll_up, tensor_digest
from omni_proxy.replica.models.llama import MLP, Attention, Batch, Llama, Span, rotary_tables
from omni_proxy.replica.models.shard import Shard
from omni_proxy.replica.models.text_model import TextModel, load_text_model
from tools.training.endpoint import digest_of_ranks

if TYPE_CHECKING:
    from typing_extensions import Buffer

QUESTION = "What do you sell?"
# Words that both models can generate: the tiny one writes only syllables.
ANSWER = "potato, tomato, salami, banana, kimono, mandolin, panorama, sonata."
RATES = {"tiny": 3e-4, "smollm2-135m": 2e-5}


class UncachedKV:
    """A stand-in for a KV cache that has no past tokens and stores nothing."""

    length = 0

    def write(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the new tokens, [kv_heads, tokens, head_size] each."""
        keys, values = rows.permute(1, 2, 0, 3).unbind(0)
        return keys, values


class Learner:
    """A model in training. `named` returns its weights under the replicas' names."""

    def __init__(self, model_name: str, *, steps: int) -> None:
        self.text: TextModel = load_text_model(model_name)
        self._steps = steps
        self._model: Llama = self.text.model
        self._tokens, self._first_target = _example(self.text)
        leaves = _leaves(self._model)
        for each in leaves:
            each.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(leaves, lr=RATES[self.text.name], weight_decay=0.0)

    def learn(self) -> float:
        """Train a few steps; return the loss before the last one, in nats per token."""
        loss = torch.zeros(())
        for _ in range(self._steps):
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._loss()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return float(loss.detach())

    def named(self) -> dict[str, Tensor]:
        """The weights that a sync sends: the live tensors, not copies."""
        return {name: each.detach() for name, each in self._model.named_parameters()}

    def checksum(self, ranks: int = 1) -> str:
        """The digest over whole tensors, or over the parts of all ranks; "" if there are none."""
        config, named = self._model.config, self.named()
        try:
            shards = [Shard(config, rank, ranks) for rank in range(ranks)]
        except ValueError:
            return ""
        return digest_of_ranks(
            [digests_of({n: shard.shard_of(n, t) for n, t in named.items()}) for shard in shards]
        )

    def _loss(self) -> Tensor:
        inputs, targets = self._tokens[:-1], self._tokens[1:]
        span = Span(0, len(inputs), UncachedKV(), None)  # type: ignore[arg-type]
        cosines, sines = (
            table[: len(inputs)].unsqueeze(1) for table in rotary_tables(self._model.config)
        )
        hidden = self._model.model(Batch(torch.tensor(inputs), (cosines, sines), (span,)))
        rows = self._model.model.norm(hidden)[self._first_target - 1 :]
        logits = functional.linear(rows, self._model.model.embed_tokens.weight)
        return functional.cross_entropy(logits, torch.tensor(targets[self._first_target - 1 :]))


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """The digest that a replica with these whole tensors reports (note:api-server 3)."""
    return roll_up(digests_of(tensors))


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: tensor_digest(name, str(each.dtype), each.shape, _bytes_of(each))
        for name, each in tensors.items()
    }


def _bytes_of(tensor: Tensor) -> Buffer:
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _leaves(model: Llama) -> list[Tensor]:
    """The tensors for the optimizer: q/k/v and gate/up are rows of one tensor each."""
    joined: list[Tensor] = []
    rows: set[int] = set()
    for module in model.modules():
        if isinstance(module, Attention):
            parts: Sequence[torch.nn.Module] = (module.q_proj, module.k_proj, module.v_proj)
        elif isinstance(module, MLP):
            parts = (module.gate_proj, module.up_proj)
        else:
            continue
        joined.append(module.joined)
        rows.update(id(part.weight) for part in parts)
    return joined + [each for each in model.parameters() if id(each) not in rows]


def _example(text: TextModel) -> tuple[list[int], int]:
    """The tokens of question and answer, and the index at which the answer begins."""
    asked = text.chat_template.render([{"role": "user", "content": QUESTION}])
    prompt = text.tokenizer.encode(asked, special=True)
    answer = text.tokenizer.encode(ANSWER)
    end = text.tokenizer.encode("<|im_end|>", special=True)
    return [*prompt, *answer, *end], len(prompt)
