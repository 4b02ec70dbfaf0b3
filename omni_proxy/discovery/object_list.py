"""JSON of the Kubernetes API: lists, decoded item by item, and lines of a watch.

Invariant: at most one item of a list is decoded at a time. Invalid JSON raises ValueError. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

_BLANK: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()


def walk_list(text: str) -> Iterator[tuple[str, object]]:
    """Yields the keys and values of an object, and for the key `items` each item separately. Raises
    ValueError, after the valid part was yielded."""
    at = _expect(text, 0, "{")
    if text[at : at + 1] == "}":
        return
    while True:
        key, at = _value(text, at)
        if not isinstance(key, str):
            raise ValueError("a key is not a string")
        at = _expect(text, at, ":")
        if key == "items" and text[at : at + 1] == "[":
            for item, after in _items(text, _blank(text, at + 1)):
                at = after
                if item is not None:
                    yield key, item
        else:
            value, at = _value(text, at)
            yield key, value
        if text[at : at + 1] == "}":
            return
        at = _expect(text, at, ",")


def _items(text: str, at: int) -> Iterator[tuple[object, int]]:
    """Yields each item and the offset after it; at the end None and the offset after the list."""
    if text[at : at + 1] == "]":
        yield None, _blank(text, at + 1)
        return
    while True:
        item, at = _value(text, at)
        yield item, at
        if text[at : at + 1] == "]":
            yield None, _blank(text, at + 1)
            return
        at = _expect(text, at, ",")


def _value(text: str, at: int) -> tuple[object, int]:
    try:
        value, after = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, _blank(text, after)


def _expect(text: str, at: int, mark: str) -> int:
    """The offset after `mark` and blanks."""
    at = _blank(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f'expected "{mark}" at character {at}')
    return _blank(text, at + 1)


def _blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return match.end() if match else at


class LineBuffer:
    """Splits a stream into lines. Raises ValueError for a line of more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add data; returns the lines that are complete now, without empty ones."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a line of more than {self._max_bytes} bytes")
        return [line for line in lines if line.strip()]
