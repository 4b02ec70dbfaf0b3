"""Readers of numbers for flags: each says what it expected.

PURE. They are `type` of argparse: bad input raises ArgumentTypeError with a text for the user.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


def whole(low: int, high: int) -> Callable[[str], int]:
    """A reader of whole numbers from `low` to `high`; it raises ArgumentTypeError."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            _refuse(f"{text!r}: expected a whole number from {low} to {high}")
        return value

    return read


def positive(text: str) -> float:
    value = not_negative(text)
    if not value:
        _refuse(f"{text!r}: expected a number above 0")
    return value


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        _refuse(f"{text!r}: expected a number, 0 or more")
    return value


def _refuse(reason: str) -> NoReturn:
    raise argparse.ArgumentTypeError(reason)
