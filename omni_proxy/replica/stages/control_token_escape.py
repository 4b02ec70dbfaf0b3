"""Escapes names of control tokens in user text, so that only the chat template writes control
tokens.

Invariant: `encode` returns the ids of the rendered text as if the user's names were plain words. A
mark contains a random number, so that no user text can be taken for a mark.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from omni_proxy.replica.models.tokenizer import Tokenizer

EDGE = "\ufdd0"  # a noncharacter: templates neither write nor test for it


class ControlTokenEscape:
    """For one rendering: `escape` what goes into the template, `encode` what it returned."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = sorted(tokenizer.control_names, key=len, reverse=True)
        self._names_pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._secret = secrets.token_hex(8)
        self._has_marks = False

    def escape(self, value: Any) -> Any:
        """Return `value` with a mark for every name in its strings, at any depth."""
        if isinstance(value, str):
            return self._names_pattern.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {key: self.escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        return value

    def _mark(self, match: re.Match[str]) -> str:
        self._has_marks = True
        return f"{EDGE}{self._secret}.{self._names.index(match[0])}{EDGE}"

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`: control tokens for names, words for marks."""
        if not self._has_marks:
            return self._tokenizer.encode(text, special=True)
        ids: list[int] = []
        marked = re.split(rf"{EDGE}{self._secret}\.(\d+){EDGE}", text)
        for index, piece in enumerate(marked):
            name = index % 2 == 1
            ids += (
                self._tokenizer.encode(self._names[int(piece)])
                if name
                else self._tokenizer.encode(piece, special=True)
            )
        return ids
