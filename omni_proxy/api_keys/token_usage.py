"""How many tokens a request will take, guessed before it is sent. Pure.

Invariant: no body is decoded, and a guess never raises.
"""

from __future__ import annotations

import re
from typing import Final

BYTES_PER_TOKEN: Final = 4  # of English text and of JSON around it
# In a JSON string a quote is escaped, so this is never a part of one.
_BEGINNING: Final = b'"max_'  # to find that from the end is much faster than the pattern
_MAX_TOKENS: Final = re.compile(
    rb'"max_(?:completion_|new_|output_)?tokens"[ \t\r\n]*:[ \t\r\n]*([0-9]{1,9})'
)


def estimate_prompt(size: int) -> int:
    """Tokens of a request's body of so many bytes."""
    return -(-size // BYTES_PER_TOKEN)


def max_tokens_in(body: bytes) -> int:
    """The most tokens that a JSON body lets the completion have, 0 if it does not say."""
    at = body.rfind(_BEGINNING)
    if at < 0:
        return 0
    found = _MAX_TOKENS.match(body, at) or _MAX_TOKENS.search(body, 0, at)
    return int(found[1]) if found is not None else 0
