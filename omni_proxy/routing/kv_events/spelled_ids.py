"""Token ids as the bytes that spell them, each with a comma before it, and where the n-th one ends.

Counting the commas is what a long list costs most, so each search leaves a mark for the next ones.
Invariant: `end_of` counts as `bytes.split` would; who says a wrong number of ids gets
places that are no ends of so many, and no error.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

COMMA: Final = b","
PART: Final = 8192  # bytes that are counted at a time
# An id with its comma is shorter, so that looking for the next few has a bound; any other spelling
# is found too, by looking further.
_ID_BYTES: Final = 12
_FEW: Final = 32  # ids from an end that are looked for from there


class SpelledIds:
    """`tokens`: how many they are, where that is known; else they are counted. `view`: of the
    bytes."""

    __slots__ = ("_counts", "_places", "spelled", "tokens", "view")

    def __init__(self, spelled: bytes, tokens: int | None = None) -> None:
        self.spelled = spelled
        self.view = memoryview(spelled)
        # How many commas there are before some places, in order.
        self._counts, self._places = [0], [0]
        if tokens is None:
            tokens = self._count()
        else:
            self._counts.append(tokens)
            self._places.append(len(spelled))
        self.tokens = tokens

    def _count(self) -> int:
        spelled, total = self.spelled, 0
        for at in range(0, len(spelled), PART):
            end = at + PART
            total += spelled.count(COMMA, at, end)
            self._counts.append(total)
            self._places.append(end)
        self._places[-1] = len(spelled)
        return total

    def end_of(self, tokens: int) -> int:
        """Where the first so many ids end."""
        spelled, length = self.spelled, len(self.spelled)
        behind = self.tokens - tokens
        if behind <= 0:
            return length
        if behind <= _FEW:
            return _nth_last_comma(spelled, 0, length, behind)
        if tokens <= _FEW:
            return _nth_comma(spelled, 0, length, tokens + 1)
        counts, places = self._counts, self._places
        mark = bisect_right(counts, tokens)
        begin, end, before = places[mark - 1], places[mark], counts[mark - 1]
        nth, commas = tokens - before, counts[mark] - before
        at = begin + (end - begin) * nth // commas
        if at - begin < end - at:
            missing = nth - spelled.count(COMMA, begin, at)
        else:
            missing = nth - commas + spelled.count(COMMA, at, end)
        if missing >= 0:  # the comma behind so many more
            place = _nth_comma(spelled, at, length, missing + 1)
        else:
            place = _nth_last_comma(spelled, begin, at, -missing)
        counts.insert(mark, tokens)
        places.insert(mark, place)
        return place


def _nth_comma(spelled: bytes, begin: int, end: int, nth: int) -> int:
    stop = min(end, begin + _ID_BYTES * nth)
    near = spelled[begin:stop].split(COMMA, nth)
    if len(near) <= nth:
        stop = end
        near = spelled[begin:stop].split(COMMA, nth)
        if len(near) <= nth:
            return end
    return stop - len(near[-1]) - 1


def _nth_last_comma(spelled: bytes, begin: int, end: int, nth: int) -> int:
    start = max(begin, end - _ID_BYTES * nth)
    near = spelled[start:end].rsplit(COMMA, nth)
    if len(near) <= nth:
        start = begin
        near = spelled[start:end].rsplit(COMMA, nth)
    return start + len(near[0])
