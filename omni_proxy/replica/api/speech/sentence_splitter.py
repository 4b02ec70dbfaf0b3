"""Splits text that arrives in chunks into segments that can be synthesized one by one. Pure.

Invariant: the same text gives the same segments regardless of chunk boundaries, with one exception:
marks and closing quotes that arrive in a later chunk than the mark before them are dropped, as they
are not audible. A mark between two digits (3.14) does not split.
"""

from __future__ import annotations

from typing import Final

# The escapes are full-width forms of the same marks, and closing quotes.
SENTENCE_MARKS: Final = frozenset(".!?\u3002\uff01\uff1f")
CLAUSE_MARKS: Final = SENTENCE_MARKS | frozenset(",\uff0c;\uff1b")
_CLOSERS: Final = frozenset("\"')]}\u00bb\u201d\u2019\u300d\u300f")
_WITHIN_NUMBERS: Final = frozenset(".,")


class SentenceSplitter:
    """Buffers text that is not part of a complete segment yet."""

    def __init__(self, *, clauses: bool = False) -> None:
        self._marks = CLAUSE_MARKS if clauses else SENTENCE_MARKS
        self._buffer = ""
        self._scanned = 0  # leading characters of the buffer in which there is no split

    @property
    def buffered_chars(self) -> int:
        return len(self._buffer)

    def feed(self, text: str) -> list[str]:
        """Return the segments that `text` completes."""
        self._buffer += text
        segments, start, index = [], 0, self._scanned
        while index < len(self._buffer):
            if self._buffer[index] not in self._marks:
                index += 1
                continue
            if self._is_undecided(index):
                break
            if self._is_in_number(index):
                index += 1
                continue
            index = self._end_of_marks(index)
            segments.append(self._buffer[start:index])
            start = index
        self._buffer = self._buffer[start:]
        self._scanned = index - start
        return _speakable(segments)

    def flush(self) -> list[str]:
        """Return the buffered text as a segment."""
        last, self._buffer, self._scanned = self._buffer, "", 0
        return _speakable([last])

    def _is_undecided(self, index: int) -> bool:
        """Whether a mark after a digit ends the buffer: a number may continue after it."""
        last = index + 1 == len(self._buffer)
        return last and self._buffer[index] in _WITHIN_NUMBERS and self._is_digit(index - 1)

    def _is_in_number(self, index: int) -> bool:
        return (
            self._buffer[index] in _WITHIN_NUMBERS
            and self._is_digit(index - 1)
            and self._is_digit(index + 1)
        )

    def _is_digit(self, index: int) -> bool:
        return 0 <= index < len(self._buffer) and self._buffer[index].isdigit()

    def _end_of_marks(self, index: int) -> int:
        while index < len(self._buffer) and (
            self._buffer[index] in self._marks or self._buffer[index] in _CLOSERS
        ):
            index += 1
        return index


def _speakable(segments: list[str]) -> list[str]:
    """Drop segments without a letter or digit: there is nothing to synthesize."""
    stripped = (segment.strip() for segment in segments)
    return [segment for segment in stripped if any(letter.isalnum() for letter in segment)]
