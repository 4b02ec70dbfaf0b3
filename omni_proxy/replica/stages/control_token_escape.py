"""Names of control tokens in what a caller wrote, kept apart from those that a template writes.

Invariant: `encode` gives the ids of the rendered text as it would be if the caller's names were
plain words. A mark holds a number that nobody can guess, so that no text is taken for a mark.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from omni_proxy.replica.models.tokenizer import Tokenizer

EDGE = "\ufdd0"  # a noncharacter: templates neither write nor look for it


class ControlTokenEscape:
    """For one rendering: hide what goes into the template, then encode what came out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = sorted(tokenizer.control_names, key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._secret = secrets.token_hex(8)
        self._any = False

    def hide(self, value: Any) -> Any:
        """Return `value` with a mark for every name in its texts, however deep they lie."""
        if isinstance(value, str):
            return self._spelt.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {key: self.hide(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(each) for each in value]
        return value

    def _mark(self, found: re.Match[str]) -> str:
        self._any = True
        return f"{EDGE}{self._secret}.{self._names.index(found[0])}{EDGE}"

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`: control tokens where names stand, words where marks do."""
        if not self._any:
            return self._tokenizer.encode(text, special=True)
        ids: list[int] = []
        marked = re.split(rf"{EDGE}{self._secret}\.(\d+){EDGE}", text)
        for place, piece in enumerate(marked):
            name = place % 2 == 1
            ids += (
                self._tokenizer.encode(self._names[int(piece)])
                if name
                else self._tokenizer.encode(piece, special=True)
            )
        return ids
