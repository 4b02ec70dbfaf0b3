"""Whisper's network in float32: spectra in, logits of the next token out.

Invariant: tokens appended one by one to a `DecodingState` get the logits that they would get all at
once. Nothing here knows the meaning of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from omni_proxy.replica.models.whisper.whisper_file import WhisperFileError

GELU = 3  # CTranslate2's number for the exact one
# What the forward pass below implements; other settings in a file are refused.
EXPECTED = {
    "decoder/activation": GELU,
    "decoder/alibi": 0,
    "decoder/pre_norm": 1,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}


@dataclass(slots=True)
class DecodingState:
    """One window while it is decoded: keys and values [1, heads, n, 64] of every decoder layer."""

    cross_attention: list[tuple[Tensor, Tensor]]
    self_attention: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    length: int = 0


class WhisperNet:
    """Encoder and decoder over the variables of a model file, under their names there."""

    def __init__(self, variables: Mapping[str, NDArray[Any]]) -> None:
        for name, expected in EXPECTED.items():
            if name not in variables or int(variables[name]) != expected:
                raise WhisperFileError(f"the model differs from Whisper in {name}")
        self._weights = {
            name: torch.from_numpy(variable).float()
            for name, variable in variables.items()
            if variable.dtype.kind == "f"
        }
        try:
            self._heads = int(variables["encoder/num_heads"])
            self._embedding = self._weights["decoder/embeddings/weight"]
            self._places = self._weights["decoder/position_encodings/encodings"]
        except KeyError as error:
            raise WhisperFileError(f"the model has no {error}") from error
        self._layers = {side: self._count_layers(side) for side in ("encoder", "decoder")}

    @property
    def vocab_size(self) -> int:
        return len(self._embedding)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of one window, including its prompt."""
        return len(self._places)

    def _count_layers(self, side: str) -> int:
        prefix = f"{side}/layer_"
        numbers = [
            number
            for name in self._weights
            if name.startswith(prefix)
            and (number := name[len(prefix) :].partition("/")[0]).isdecimal()
        ]
        return 1 + max(map(int, numbers))

    @torch.inference_mode()
    def encode(self, mel: Tensor) -> DecodingState:
        """Encode the spectrum [80, 3000] of one window and return its decoding state."""
        sound = F.gelu(self._convolve(mel[None], "encoder/conv1", 1))
        sound = F.gelu(self._convolve(sound, "encoder/conv2", 2))[0].T
        sound = sound + self._weights["encoder/position_encodings/encodings"]
        for place in range(self._layers["encoder"]):
            layer = f"encoder/layer_{place}"
            inside = self._normed(sound, f"{layer}/self_attention")
            queries, keys, values = self._parts(inside, f"{layer}/self_attention/linear_0", 3)
            mixed = F.scaled_dot_product_attention(queries, keys, values)
            sound = sound + self._joined(mixed, f"{layer}/self_attention/linear_1")
            sound = sound + self._feed_forward(sound, layer)
        sound = self._normed(sound, "encoder")
        heard = []
        for place in range(self._layers["decoder"]):
            keys, values = self._parts(sound, f"decoder/layer_{place}/attention/linear_1", 2)
            heard.append((keys, values))
        return DecodingState(heard)

    @torch.inference_mode()
    def decode(self, tokens: list[int], decoding: DecodingState) -> Tensor:
        """Append `tokens`; return the logits [n, vocab_size] after each."""
        end = decoding.length + len(tokens)
        state = self._embedding[tokens] + self._places[decoding.length : end]
        before = decoding.self_attention
        decoding.self_attention = []
        for place in range(self._layers["decoder"]):
            layer = f"decoder/layer_{place}"
            inside = self._normed(state, f"{layer}/self_attention")
            queries, keys, values = self._parts(inside, f"{layer}/self_attention/linear_0", 3)
            if before:
                keys = torch.cat((before[place][0], keys), dim=2)
                values = torch.cat((before[place][1], values), dim=2)
            decoding.self_attention.append((keys, values))
            # Causal mask: each token attends to itself and the tokens before it.
            seen = torch.ones(len(tokens), end, dtype=torch.bool).tril(decoding.length)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
            state = state + self._joined(mixed, f"{layer}/self_attention/linear_1")
            inside = self._normed(state, f"{layer}/attention")
            (queries,) = self._parts(inside, f"{layer}/attention/linear_0", 1)
            mixed = F.scaled_dot_product_attention(queries, *decoding.cross_attention[place])
            state = state + self._joined(mixed, f"{layer}/attention/linear_2")
            state = state + self._feed_forward(state, layer)
        decoding.length = end
        return self._normed(state, "decoder") @ self._embedding.T

    def _convolve(self, sound: Tensor, name: str, stride: int) -> Tensor:
        weights = self._weights
        return F.conv1d(sound, weights[f"{name}/weight"], weights[f"{name}/bias"], stride, 1)

    def _linear(self, state: Tensor, name: str) -> Tensor:
        return F.linear(state, self._weights[f"{name}/weight"], self._weights[f"{name}/bias"])

    def _normed(self, state: Tensor, name: str) -> Tensor:
        gamma, beta = (self._weights[f"{name}/layer_norm/{part}"] for part in ("gamma", "beta"))
        return F.layer_norm(state, gamma.shape, gamma, beta)

    def _parts(self, state: Tensor, name: str, count: int) -> list[Tensor]:
        """Apply one fused projection and split it into `count` tensors [1, heads, n, 64].

        Without the leading 1 torch does not use its fast attention.
        """
        fused = self._linear(state, name).view(1, len(state), count, self._heads, -1)
        return list(fused.permute(2, 0, 3, 1, 4))

    def _joined(self, mixed: Tensor, name: str) -> Tensor:
        return self._linear(mixed[0].transpose(0, 1).flatten(1), name)

    def _feed_forward(self, state: Tensor, layer: str) -> Tensor:
        inside = F.gelu(self._linear(self._normed(state, f"{layer}/ffn"), f"{layer}/ffn/linear_0"))
        return self._linear(inside, f"{layer}/ffn/linear_1")
