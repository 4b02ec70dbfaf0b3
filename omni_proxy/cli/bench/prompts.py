"""Prompts of about a wanted number of tokens, as text.

PURE. Assumption: one common English word is one token; the chat template and other tokenizers add
to it, so figures take tokens from the server's `usage`. Equal block ids with an equal seed give
equal text, and a shorter block is the beginning of a longer one.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Final

from omni_proxy.simulate.workload import Request

_TEXT: Final = """\
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea body information back
parent face level office door health person art war history party result change morning
reason research girl guy moment air teacher force education food
"""
_WORDS: Final = tuple(_TEXT.split())
_PHRASE_WORDS: Final = 16
_PHRASES: Final = tuple(
    tuple(Random(place).choices(_WORDS, k=_PHRASE_WORDS)) for place in range(4096)
)


class PromptTexts:
    """Texts of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._unshared = 0
        # Shared beginnings are asked for again and again.
        self._block = lru_cache(4096)(self._make)

    def prompt(self, request: Request) -> str:
        """Of a request of the workload; two without blocks share nothing."""
        if not request.blocks:
            return self.words(request.input_tokens)
        blocks = (
            self._block(block, request.block_size(place))
            for place, block in enumerate(request.blocks)
        )
        return " ".join(text for text in blocks if text)

    def words(self, tokens: int) -> str:
        """New text, as the next message of a chat is."""
        self._unshared += 1
        return self._make(-self._unshared, tokens)

    def _make(self, name: int, tokens: int) -> str:
        chance = Random(f"{self._seed} {name}")
        phrases = chance.choices(_PHRASES, k=-(-tokens // _PHRASE_WORDS))
        return " ".join([word for phrase in phrases for word in phrase][:tokens])
