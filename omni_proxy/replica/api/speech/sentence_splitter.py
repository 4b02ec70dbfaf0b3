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
        segments, start, at = [], 0, self._scanned
        while at < len(self._buffer):
            if self._buffer[at] not in self._marks:
                at += 1
                continue
            if self._is_undecided(at):
                break
            if self._is_in_number(at):
                at += 1
                continue
            at = self._end_of_marks(at)
            segments.append(self._buffer[start:at])
            start = at
        self._buffer = self._buffer[start:]
        self._scanned = at - start
        return _speakable(segments)

    def flush(self) -> list[str]:
        """Return the buffered text as a segment."""
        last, self._buffer, self._scanned = self._buffer, "", 0
        return _speakable([last])

    def _is_undecided(self, at: int) -> bool:
        """Whether a mark after a digit ends the buffer: a number may continue after it."""
        last = at + 1 == len(self._buffer)
        return last and self._buffer[at] in _WITHIN_NUMBERS and self._is_digit(at - 1)

    def _is_in_number(self, at: int) -> bool:
        return (
            self._buffer[at] in _WITHIN_NUMBERS
            and self._is_digit(at - 1)
            and self._is_digit(at + 1)
        )

    def _is_digit(self, at: int) -> bool:
        return 0 <= at < len(self._buffer) and self._buffer[at].isdigit()

    def _end_of_marks(self, at: int) -> int:
        while at < len(self._buffer) and (
            self._buffer[at] in self._marks or self._buffer[at] in _CLOSERS
        ):
            at += 1
        return at


def _speakable(segments: list[str]) -> list[str]:
    """Drop segments without a letter or digit: there is nothing to synthesize."""
    stripped = (segment.strip() for segment in segments)
    return [segment for segment in stripped if any(letter.isalnum() for letter in segment)]
