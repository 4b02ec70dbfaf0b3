"""Byte-pair tokenizer: text to token ids and back, by the merges of a model file.

Invariant: decoding encoded text gives the same text, except for characters that the vocabulary
cannot represent. `encode` returns ids of control tokens only with `special`, and they have no text.
No text makes it fail.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import tiktoken

REPLACEMENT = "\ufffd"
# The pattern's look-ahead uses stack for each space: a million of them would overflow it.
MAX_ENCODE_CHARS = 1 << 16
# How the text is split before merging. Digits are single, so a space before one is, too.
PATTERN = r"\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# Halves of characters that JSON can carry and UTF-8 cannot.
_SURROGATES = re.compile("[\ud800-\udfff]")


class Tokenizer(Protocol):
    """What the text stage needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def control_names(self) -> Collection[str]:
        """The names that `encode` with `special` reads as control tokens."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids; with `special`, names of control tokens in the text become these
        tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of the token as bytes; b"" for a control token."""

    def control_name(self, token_id: int) -> str | None:
        """Return the name of a control token; None for a token with text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the whole text; invalid UTF-8 becomes U+FFFD."""


class Utf8Stream:
    """Incremental UTF-8 decoding of bytes in chunks; the result is that of the whole."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        """Return the characters that are complete; an incomplete one is kept for the next call."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """Return the incomplete character as U+FFFD, and reset."""
        return self._decoder.decode(b"", final=True)


def byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves, the others for the letters from U+0100 on, in
    order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return letters


class ControlTokens:
    """The control tokens, found in a text by their names."""

    __slots__ = ("_cut", "ids", "names")

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        self.names = {token_id: name for name, token_id in ids.items()}
        longest_first = sorted(ids, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if ids else None

    def encode(self, text: str, plain: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of the control tokens, and of the text between them as encoded by
        `plain`."""
        if self._cut is None:
            return plain(text)
        ids: list[int] = []
        for piece in self._cut.split(text):
            ids += [self.ids[piece]] if piece in self.ids else plain(piece)
        return ids


class ByteTokenizer(ABC):
    """Tokens that are bytes, and control tokens by their names; how text is cut is a subclass's."""

    _bytes: list[bytes]  # by token id; empty for control tokens
    _controls: ControlTokens

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._controls.encode(text, self._plain) if special else self._plain(text)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def control_name(self, token_id: int) -> str | None:
        return self._controls.names.get(token_id)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    @abstractmethod
    def _plain(self, text: str) -> list[int]:
        """The ids of text in which control tokens mean nothing."""


class BytePairTokenizer(ByteTokenizer):
    """Byte-pair encoding over a vocabulary whose ids are in the order of its merges.

    A vocabulary may lack bytes that its training never met; characters that need one are read as
    U+FFFD.
    """

    def __init__(
        self, vocabulary: Sequence[str], control_ids: Iterable[int], eos_ids: Iterable[int]
    ) -> None:
        """Take the vocabulary as a model file spells it: byte letters, control tokens as text.

        Raises ValueError for a token that is neither or is there twice, and for a vocabulary
        without a printable byte.
        """
        self._controls = ControlTokens({vocabulary[token_id]: token_id for token_id in control_ids})
        ranks = _ranks(vocabulary, self._controls.ids)
        self._bytes = [b""] * len(vocabulary)
        for token, token_id in ranks.items():
            self._bytes[token_id] = token
        self._missing = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
        for byte in (*range(0x20, 0x7F), *REPLACEMENT.encode()):
            if byte in self._missing:
                raise ValueError(f"the vocabulary has no token for the byte {byte:#04x}")
        self._encoding = tiktoken.Encoding(
            "model", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        self.vocab_size = len(vocabulary)
        self.eos_ids = frozenset(eos_ids)
        self.control_names = self._controls.ids.keys()

    def _plain(self, text: str) -> list[int]:
        text = self._spellable(text)
        ids: list[int] = []
        for start in range(0, len(text), MAX_ENCODE_CHARS):
            ids += self._encoding.encode_ordinary(text[start : start + MAX_ENCODE_CHARS])
        return ids

    def _spellable(self, text: str) -> str:
        # tiktoken panics, past `except Exception`, over a byte that it has no token for.
        if _SURROGATES.search(text):
            text = _SURROGATES.sub(REPLACEMENT, text)
        spelt = text.encode()
        if len(spelt.translate(None, self._missing)) == len(spelt):
            return text
        missing = set(self._missing)
        return "".join(
            REPLACEMENT if missing.intersection(letter.encode()) else letter for letter in text
        )


def _ranks(vocabulary: Sequence[str], controls: Mapping[str, int]) -> dict[bytes, int]:
    letters = byte_letters()
    ranks: dict[bytes, int] = {}
    for token_id, token in enumerate(vocabulary):
        if controls.get(token) == token_id:
            continue
        try:
            spelt = bytes(letters[letter] for letter in token)
        except KeyError as error:
            raise ValueError(
                f"token {token_id} of the vocabulary, {token!r}, is not spelt in byte letters"
            ) from error
        if ranks.setdefault(spelt, token_id) != token_id:
            raise ValueError(f"token {token_id} of the vocabulary, {token!r}, is there twice")
    return ranks
