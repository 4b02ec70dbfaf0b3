"""Token ids as the bytes that spell them, each with a comma before it, and where the n-th one ends.

Counting commas is what a long list costs most: a processor can't foresee where they are, so a loop
that looks for each is slow. A copy with 1 for a comma and 0 for all else has their number as its
sum, which Adler-32 has in its lower half and computes without looking; a short list is not worth
the copy. Each search leaves a mark for the next ones. Invariant: `end_of` counts as `bytes.split`
would; who says a wrong number of ids gets places that are no ends of so many, and no error. The
native build has `spelled_ids.pyx` in its place, which counts all commas itself.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final
from zlib import adler32

COMMA: Final = b","
PART: Final = 8192  # bytes that are counted at a time; Adler-32 counts up to 65,520
LONG: Final = 12288  # bytes that are worth a copy
_COMMAS: Final = bytes(byte == COMMA[0] for byte in range(256))
_SUM: Final = 0xFFFF  # Adler-32's sum of all bytes, and one
# An id with its comma is shorter, so that looking for the next few has a bound; any other spelling
# is found too, by looking further.
_ID_BYTES: Final = 12
_FEW: Final = 32  # ids from an end that are looked for from there
_EARLY: Final = 24  # bytes before the guessed place, so that the right one is seldom before it


def without_spaces(spelled: bytes) -> bytes:
    return spelled.translate(None, b" ")


class SpelledIds:
    """`tokens`: how many they are, where that is known; else they are counted. `view`: of the
    bytes."""

    __slots__ = ("_commas", "_counts", "_places", "spelled", "tokens", "view")

    def __init__(self, spelled: bytes, tokens: int | None = None) -> None:
        self.spelled = spelled
        self.view = memoryview(spelled)
        self._commas: memoryview | None = None
        if tokens is None:
            tokens = self._mark() if len(spelled) > LONG else spelled.count(COMMA)
        self.tokens = tokens
        if self._commas is None:
            # How many commas there are before some places, in order.
            self._counts, self._places = [0, tokens], [0, len(spelled)]

    def _mark(self) -> int:
        """Count all, part by part."""
        commas = self._commas = memoryview(self.spelled.translate(_COMMAS))
        self._counts, self._places, total = [0], [0], 0
        for at in range(0, len(commas), PART):
            total += (adler32(commas[at : at + PART]) & _SUM) - 1
            self._counts.append(total)
            self._places.append(at + PART)
        self._places[-1] = len(commas)
        return total

    def end_of(self, tokens: int) -> int:
        """Where the first so many ids end."""
        spelled, behind = self.spelled, self.tokens - tokens
        if behind <= 0:
            return len(spelled)
        if tokens <= _FEW:
            return _nth_comma(spelled, 0, tokens + 1)
        if behind <= _FEW:
            return _nth_last_comma(spelled, behind)
        if self._commas is None and len(spelled) > LONG:
            self._mark()
        counts, places, commas = self._counts, self._places, self._commas
        mark = bisect_right(counts, tokens)
        if mark == len(counts):
            return len(spelled)
        begin, before = places[mark - 1], counts[mark - 1]
        at = begin + (places[mark] - begin) * (tokens - before) // (counts[mark] - before) - _EARLY
        if at <= begin:
            at, nth = begin, tokens - before + 1
        elif commas is None:
            nth = tokens - before - spelled.count(COMMA, begin, at) + 1
        else:
            nth = tokens - before - (adler32(commas[begin:at]) & _SUM) + 2
        if nth <= 0:  # it is before there
            at, nth = begin, tokens - before + 1
        near = spelled[at : at + _ID_BYTES * nth].split(COMMA, nth)
        if len(near) > nth:
            place = min(at + _ID_BYTES * nth, len(spelled)) - len(near[-1]) - 1
        else:
            place = _nth_comma(spelled, at, nth)
        counts.insert(mark, tokens)
        places.insert(mark, place)
        return place


def _nth_comma(spelled: bytes, begin: int, nth: int) -> int:
    """The n-th from there on, or the end."""
    near = spelled[begin : begin + _ID_BYTES * nth].split(COMMA, nth)
    if len(near) <= nth:
        near = spelled[begin:].split(COMMA, nth)
        return len(spelled) - (len(near[-1]) + 1 if len(near) > nth else 0)
    return min(begin + _ID_BYTES * nth, len(spelled)) - len(near[-1]) - 1


def _nth_last_comma(spelled: bytes, nth: int) -> int:
    """The n-th from the end, or the beginning."""
    start = max(0, len(spelled) - _ID_BYTES * nth)
    near = spelled[start:].rsplit(COMMA, nth)
    if len(near) <= nth:
        start = 0
        near = spelled.rsplit(COMMA, nth)
    return start + len(near[0])
