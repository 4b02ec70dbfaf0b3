"""JSON from other servers, parsed with a limit on the number of values.

Invariant: a text with more values than the limit is refused before any of them is created. A limit
in bytes is not enough: 4 MB can be one string or a million objects. Parsing holds the GIL, so a
thread would not help.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

MAX_INTEGER: Final = 2**53  # every JSON reader keeps integers up to this exactly
MAX_VALUES: Final = 100_000
SPARE_LEVELS: Final = 50  # recursion levels left for encoding the value inside other values


class TooManyValues(ValueError):
    """The text has more values than the limit, and was not parsed."""


def without_lone_surrogates(raw: bytes, value: object) -> object:
    """`value`, which was parsed from `raw`, with each lone surrogate replaced by a question mark:
    JSON can escape them, UTF-8 can't encode them."""
    if b"\\u" not in raw:
        return value
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def max_value_count(raw: bytes) -> int:
    """An upper bound of the values in `raw`: each but the first follows one of these bytes."""
    return 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{") + raw.count(b":")


def read_json(raw: bytes, max_values: int = MAX_VALUES) -> object:
    """Raises ValueError if `raw` is not JSON, TooManyValues beyond `max_values`."""
    if max_value_count(raw) > max_values:
        raise TooManyValues(f"more than {max_values} values")
    try:
        return _loads(raw, SPARE_LEVELS)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _loads(raw: bytes, levels: int) -> object:
    """Parse with `levels` more stack frames in use, so that they are free afterwards."""
    if levels:
        return _loads(raw, levels - 1)
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        pass
    return json.loads(raw)  # slower, but it accepts NaN and other encodings
