"""JSON of the Kubernetes API: lists that are read item by item, and lines of a watch.

Invariant: a list of any length costs its reader no more at a time than one item. Nothing but JSON
objects comes out; text that is none is a ValueError. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

_BLANK: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()


def walk_list(text: str) -> Iterator[tuple[str, object]]:
    """The keys of an object and their values; of the key `items` each item by itself. Raises
    ValueError, with what came before it yielded."""
    at = _expect(text, 0, "{")
    if text[at : at + 1] == "}":
        return
    while True:
        key, at = _value(text, at)
        if not isinstance(key, str):
            raise ValueError("a key is no string")
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
    """Each item, and the place after it; last None, and the place after the list."""
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
    """The place after `mark` and blanks."""
    at = _blank(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f'expected "{mark}" at character {at}')
    return _blank(text, at + 1)


def _blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return match.end() if match else at


class LineBuffer:
    """Splits a stream into lines; a line of more than `max_bytes` is a ValueError."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now, without empty ones."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a line of more than {self._max_bytes} bytes")
        return [line for line in lines if line.strip()]
