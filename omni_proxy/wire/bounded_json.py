"""JSON of others, read within a bound on what one turn of the loop may walk.

Invariant: what has more values than the bound is refused before any of them is made. Bytes alone
bound nothing: 4 MB can hold one string, or a million objects. Reading holds the GIL until it is
done, so a thread would not help those who wait.
"""

from __future__ import annotations

import json
from typing import Final

MAX_VALUES: Final = 100_000  # some 20 ms to read
SPARE_LEVELS: Final = 50  # what was read is written again, inside other values


class TooManyValues(ValueError):
    """It was not read."""


def max_value_count(raw: bytes) -> int:
    """Never fewer than `raw` has: each but the first stands behind one of these."""
    return 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{") + raw.count(b":")


def read_json(raw: bytes, max_values: int = MAX_VALUES) -> object:
    """Raises ValueError for what is no JSON, TooManyValues past the bound."""
    if max_value_count(raw) > max_values:
        raise TooManyValues(f"more than {max_values} values")
    try:
        return _loads(raw, SPARE_LEVELS)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _loads(raw: bytes, levels: int) -> object:
    """With so many levels of recursion left to spare."""
    return _loads(raw, levels - 1) if levels else json.loads(raw)
