"""The one place of the text stage that touches a model: forward passes, nothing else.

Invariant: called from the stage's thread alone, never twice at once. It keeps no request's state:
a KV belongs to its sequence. Weights are changed here and only between two passes.
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
    """Owns a text model: all of it, or what rank `tp_rank` of `tp_size` holds of each tensor."""

    tp_rank = 0
    tp_size = 1

    def __init__(self, text: TextModel) -> None:
        self.text = text

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.text.context

    @property
    def vocabulary(self) -> int:
        return self.text.model.config.vocab_size

    @property
    def dtype(self) -> str:
        """Of the weights, and of the keys and values made with them; "float32", say."""
        return str(self.text.model.model.embed_tokens.weight.dtype).removeprefix("torch.")

    def new_kv(self) -> SequenceKV:
        return self.text.model.new_kv()

    def forward(self, parts: Sequence[BatchPart]) -> Tensor:
        """Append every part's tokens to its KV; return the logits after each: [parts, vocabulary].

        Whatever it raises, the KVs of `parts` may be in no usable state then.
        """
        return self.text.model.forward(parts)

    def embed(self, tokens: Sequence[int]) -> list[float]:
        """Return the mean of the tokens' last hidden states, as a vector of length 1."""
        mean = self.text.model.hidden(tokens).double().mean(0)
        vector: list[float] = functional.normalize(mean, dim=0).tolist()
        return vector

    def whole(self, name: str, tensor: Tensor) -> Tensor | None:
        """The whole tensor of which `tensor` is held here; None at all ranks but the first.

        All ranks call it for the same names in the same order, from a thread of their choice.
        """
        return tensor
