"""Runs the model of the text stage: forward passes and embeddings.

Invariant: called from the stage's thread only, never concurrently. It keeps no request's state: a
KV belongs to its sequence. Weights are changed only between two passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.llama import BatchPart
from omni_proxy.replica.models.text_model import TextModel
from omni_proxy.replica.models.tokenizer import Tokenizer


class ModelWorker:
    """Owns a text model: all of it, or the shard of rank `tp_rank` of `tp_size`."""

    tp_rank = 0
    tp_size = 1

    def __init__(self, text: TextModel) -> None:
        self.text = text

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return self.text.context

    @property
    def vocabulary(self) -> int:
        return self.text.model.config.vocab_size

    @property
    def dtype(self) -> str:
        """Dtype of the weights and of keys and values, such as "float32"."""
        return str(self.text.model.model.embed_tokens.weight.dtype).removeprefix("torch.")

    def new_kv(self) -> SequenceKV:
        return self.text.model.new_kv()

    def forward(self, parts: Sequence[BatchPart]) -> Tensor:
        """Append every part's tokens to its KV; return the logits after each: [parts, vocabulary].

        If it raises, the KVs of `parts` are undefined.
        """
        return self.text.model.forward(parts)

    def embed(self, tokens: Sequence[int]) -> list[float]:
        """Return the mean of the tokens' last hidden states, as a vector of length 1."""
        mean = self.text.model.hidden(tokens).double().mean(0)
        vector: list[float] = functional.normalize(mean, dim=0).tolist()
        return vector

    def whole(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the complete tensor of which `tensor` is the local shard; None at all ranks but
        the first.

        All ranks call it for the same names in the same order, from any one thread.
        """
        return tensor
