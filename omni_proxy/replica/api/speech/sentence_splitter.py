"""Cuts text that comes in pieces into what can be spoken on its own. Pure.

Invariant: the same text gives the same segments, but for one thing however it is divided: marks and
closing quotes that come in a later piece than the mark they follow are dropped, as nothing of them
is heard. A mark between two digits (3.14) cuts nothing.
"""

from __future__ import annotations

from typing import Final

# Escaped are the full-width forms of the same marks, and closing quotes.
SENTENCE_MARKS: Final = frozenset(".!?\u3002\uff01\uff1f")
CLAUSE_MARKS: Final = SENTENCE_MARKS | frozenset(",\uff0c;\uff1b")
_CLOSERS: Final = frozenset("\"')]}\u00bb\u201d\u2019\u300d\u300f")
_WITHIN_NUMBERS: Final = frozenset(".,")


class SentenceSplitter:
    """Holds what has not been cut yet."""

    def __init__(self, *, clauses: bool = False) -> None:
        self._marks = CLAUSE_MARKS if clauses else SENTENCE_MARKS
        self._held = ""
        self._seen = 0  # so many characters of it were looked at: none of them is a cut

    @property
    def held_chars(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> list[str]:
        """Return the segments that `text` completes."""
        self._held += text
        segments, start, at = [], 0, self._seen
        while at < len(self._held):
            if self._held[at] not in self._marks:
                at += 1
                continue
            if self._undecided(at):
                break
            if self._in_number(at):
                at += 1
                continue
            at = self._end_of_marks(at)
            segments.append(self._held[start:at])
            start = at
        self._held = self._held[start:]
        self._seen = at - start
        return _speakable(segments)

    def flush(self) -> list[str]:
        """Return what is held as a segment of its own."""
        last, self._held, self._seen = self._held, "", 0
        return _speakable([last])

    def _undecided(self, at: int) -> bool:
        """A mark after a digit, at the end of what has come: a number may go on after it."""
        last = at + 1 == len(self._held)
        return last and self._held[at] in _WITHIN_NUMBERS and self._digit(at - 1)

    def _in_number(self, at: int) -> bool:
        return self._held[at] in _WITHIN_NUMBERS and self._digit(at - 1) and self._digit(at + 1)

    def _digit(self, at: int) -> bool:
        return 0 <= at < len(self._held) and self._held[at].isdigit()

    def _end_of_marks(self, at: int) -> int:
        while at < len(self._held) and (
            self._held[at] in self._marks or self._held[at] in _CLOSERS
        ):
            at += 1
        return at


def _speakable(segments: list[str]) -> list[str]:
    """Drop what has no letter and no digit: there is nothing in it to speak."""
    stripped = (segment.strip() for segment in segments)
    return [segment for segment in stripped if any(letter.isalnum() for letter in segment)]
