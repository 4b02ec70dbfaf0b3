"""Byte-pair tokenizer: text to token ids and back, by the merges of a model file.

Invariant: decoding encoded text gives the same text, except for characters that the vocabulary
cannot represent. `encode` returns ids of control tokens only with `special`; they have no text.
`encode` never fails, for any text.
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
# Splits the text before merging. Each digit is separate, so a space before it is separate, too.
PATTERN = r"\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# Lone surrogates, which JSON can represent and UTF-8 cannot.
_SURROGATES = re.compile("[\ud800-\udfff]")


class Tokenizer(Protocol):
    """The methods of a tokenizer that the text stage uses."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def control_names(self) -> Collection[str]:
        """The names that `encode` with `special` converts to control tokens."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids; with `special`, names of control tokens become control tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's text as bytes; b"" for a control token."""

    def control_name(self, token_id: int) -> str | None:
        """Return the name of a control token; None for a token with text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the whole text; invalid UTF-8 becomes U+FFFD."""


class Utf8Stream:
    """Incremental UTF-8 decoding; chunk boundaries don't change the result."""

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
    """Finds the names of control tokens in a text."""

    __slots__ = ("_cut", "ids", "names")

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        self.names = {token_id: name for name, token_id in ids.items()}
        longest_first = sorted(ids, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if ids else None

    def encode(self, text: str, plain: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of control tokens, and of the text between them, encoded by `plain`."""
        if self._cut is None:
            return plain(text)
        ids: list[int] = []
        for piece in self._cut.split(text):
            ids += [self.ids[piece]] if piece in self.ids else plain(piece)
        return ids


class ByteTokenizer(ABC):
    """Tokens that are bytes, and named control tokens; a subclass splits the text into tokens."""

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
        """Encode text without interpreting names of control tokens."""


class BytePairTokenizer(ByteTokenizer):
    """Byte-pair encoding over a vocabulary whose ids are in the order of its merges.

    A vocabulary may lack bytes that were not in its training data; characters that need one are
    encoded as U+FFFD.
    """

    def __init__(
        self, vocabulary: Sequence[str], control_ids: Iterable[int], eos_ids: Iterable[int]
    ) -> None:
        """`vocabulary` is written as in a model file: byte letters, control tokens as text.

        Raises ValueError for a token that is neither, for a duplicate, and for a vocabulary that
        lacks a printable byte.
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
        text = self._replace_unencodable(text)
        ids: list[int] = []
        for start in range(0, len(text), MAX_ENCODE_CHARS):
            ids += self._encoding.encode_ordinary(text[start : start + MAX_ENCODE_CHARS])
        return ids

    def _replace_unencodable(self, text: str) -> str:
        # For a byte without a token tiktoken panics, which `except Exception` doesn't catch.
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
                f"token {token_id} of the vocabulary, {token!r}, is not written in byte letters"
            ) from error
        if ranks.setdefault(spelt, token_id) != token_id:
            raise ValueError(f"token {token_id} of the vocabulary, {token!r}, is a duplicate")
    return ranks
