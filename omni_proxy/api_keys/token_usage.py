"""Estimates the tokens of a request before it is sent. Pure.

Invariant: bodies are not decoded, and an estimate never raises.
"""

from __future__ import annotations

import re
from typing import Final

BYTES_PER_TOKEN: Final = 4  # mean of English text with the JSON around it
# Never part of a JSON string, in which quotes are escaped.
_BEGINNING: Final = b'"max_'  # searched from the end first, which is much faster than the pattern
_MAX_TOKENS: Final = re.compile(
    rb'"max_(?:completion_|new_|output_)?tokens"[ \t\r\n]*:[ \t\r\n]*([0-9]{1,9})'
)


def estimate_prompt(size: int) -> int:
    """Tokens of a request body with `size` bytes."""
    return -(-size // BYTES_PER_TOKEN)


def max_tokens_in(body: bytes) -> int:
    """The limit of completion tokens in a JSON body, 0 if it has none."""
    at = body.rfind(_BEGINNING)
    if at < 0:
        return 0
    found = _MAX_TOKENS.match(body, at) or _MAX_TOKENS.search(body, 0, at)
    return int(found[1]) if found is not None else 0
