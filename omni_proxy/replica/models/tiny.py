"""A seeded Llama without a file: 0.85 million parameters, built in milliseconds, for tests.

Invariant: a seed always gives the same bytes. The generated text is meaningless syllables, but it
varies, is always printable, and practically never ends before its token limit.
"""

from __future__ import annotations

from itertools import product

import torch

from omni_proxy.replica.models.llama import Llama, LlamaConfig
from omni_proxy.replica.models.tokenizer import ByteTokenizer, ControlTokens

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
PUNCTUATION = (". ", ", ", "? ", "! ", "; ", ": ", " - ", "'s", "...", "), ", " (", ".\n")
ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t")
VOWELS = ("a", "e", "i", "o", "u", "an", "el", "in", "or", "us")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=8192,
)
# Without sharp attention, and layers that outweigh the embedding, the text would repeat itself.
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 2.0, "down_proj": 2.0}
# Lower ids are control tokens and single bytes, which are read but never generated.
FIRST_SYLLABLE = len(CONTROLS) + 256


class TinyTokenizer(ByteTokenizer):
    """Encodes the longest syllable first, all other text as bytes, so any text round-trips."""

    def __init__(self) -> None:
        syllables = ["".join(pair) for pair in product(ONSETS, VOWELS)]
        written = [" " + text for text in syllables] + syllables + list(PUNCTUATION)
        self._bytes = [b""] * len(CONTROLS) + [bytes([byte]) for byte in range(256)]
        self._bytes += [text.encode() for text in written]
        self._ids = {text: FIRST_SYLLABLE + place for place, text in enumerate(written)}
        self._longest = max(map(len, written))
        self._controls = ControlTokens({name: token_id for token_id, name in enumerate(CONTROLS)})
        self.control_names = CONTROLS
        self.vocab_size = len(self._bytes)
        self.eos_ids = frozenset({CONTROLS.index("<|endoftext|>"), CONTROLS.index("<|im_end|>")})

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(text):
            for stop in range(min(start + self._longest, len(text)), start, -1):
                token_id = self._ids.get(text[start:stop])
                if token_id is not None:
                    ids.append(token_id)
                    break
            else:
                stop = start + 1
                # A lone surrogate cannot be encoded as UTF-8, so it is replaced.
                letter = text[start].encode("utf-8", errors="replace")
                ids += (len(CONTROLS) + byte for byte in letter)
            start = stop
        return ids


def build(seed: int = 0) -> Llama:
    """Return the model; two builds with one seed have the same bytes in every weight."""
    chance = torch.Generator().manual_seed(seed)
    model = Llama(CONFIG)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
                continue
            spread = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
            weight.normal_(0.0, GAINS.get(name.split(".")[-2], 1.0) * spread, generator=chance)
        _silence_bytes(model)
    return model


def _silence_bytes(model: Llama) -> None:
    """Make control tokens and single bytes practically impossible.

    No layer writes into feature 0, so its value from the embeddings reaches the last norm, whose
    weight makes it lower the logits of the tokens that have most of it. The sign of the other
    features makes a token unlikely to repeat, so the text does not loop.
    """
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = 1.0
    embedding[:FIRST_SYLLABLE, 0] = 4.0
    model.model.norm.weight.fill_(-0.2)
    model.model.norm.weight[0] = -60.0
