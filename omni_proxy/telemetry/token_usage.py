"""The token counts that a response reports, parsed from its last bytes.

Best effort: a response that is compressed, or has its `usage` anywhere but at the end, gives none.
Never raises, whatever the bytes are.
"""

from __future__ import annotations

import json
from typing import Final

TAIL_BYTES: Final = 8192
# By the names that engines use; the first one that is there counts.
NAMES: Final = {
    "input": ("prompt_tokens", "input_tokens"),
    "output": ("completion_tokens", "output_tokens"),
}
_LARGEST: Final = 2**53
_decoder = json.JSONDecoder()


def tokens_in(tail: bytes) -> dict[str, int]:
    """`input` and `output`, those that are reported."""
    start = tail.rfind(b'"usage"')
    if start < 0:
        return {}
    text = tail[start + len(b'"usage"') :].decode("utf-8", "replace").lstrip(": \t\r\n")
    try:
        usage, _ = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(usage, dict):
        return {}
    token_counts = {}
    for kind, names in NAMES.items():
        counts = [usage[name] for name in names if _is_count(usage.get(name))]
        if counts:
            token_counts[kind] = counts[0]
    return token_counts


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST
