"""Token ids as text, each with a comma before it, and the offset at which the n-th id ends.

Counting commas is the most expensive step for a long list: branch prediction fails in a loop that
searches each. Instead, in a copy with 1 for commas and 0 for other bytes, their number is the sum,
which is the lower half of Adler-32; short lists are counted directly. Each search caches its
result for the next ones. Invariant: `end_of` counts like `bytes.split`. If the caller passes a
wrong number of ids, offsets are wrong, without an error. In the native build `token_id_text.pyx`
replaces this file; it counts all commas itself.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final
from zlib import adler32

COMMA: Final = b","
PART: Final = 8192  # bytes counted at a time; Adler-32's sum is correct up to 65,520
LONG: Final = 12288  # bytes from which the copy is faster
_COMMAS: Final = bytes(byte == COMMA[0] for byte in range(256))
_SUM: Final = 0xFFFF  # mask of Adler-32's lower half: the sum of all bytes plus one
# Upper bound of the length of an id with its comma, which limits a search for the next few; longer
# spellings are found by a second search.
_ID_BYTES: Final = 12
_FEW: Final = 32  # up to this many ids from either end are searched from that end
_EARLY: Final = 24  # bytes to start before the estimated offset, which may be too high


def without_spaces(data: bytes) -> bytes:
    return data.translate(None, b" ")


class TokenIdText:
    """`tokens`: the number of ids, if known; otherwise they are counted. `view`: a memoryview of
    `data`."""

    __slots__ = ("_commas", "_counts", "_places", "data", "tokens", "view")

    def __init__(self, data: bytes, tokens: int | None = None) -> None:
        self.data = data
        self.view = memoryview(data)
        self._commas: memoryview | None = None
        if tokens is None:
            tokens = self._mark() if len(data) > LONG else data.count(COMMA)
        self.tokens = tokens
        if self._commas is None:
            # Sorted offsets, and the number of commas before each.
            self._counts, self._places = [0, tokens], [0, len(data)]

    def _mark(self) -> int:
        """Count all commas, part by part."""
        commas = self._commas = memoryview(self.data.translate(_COMMAS))
        self._counts, self._places, total = [0], [0], 0
        for start in range(0, len(commas), PART):
            total += (adler32(commas[start : start + PART]) & _SUM) - 1
            self._counts.append(total)
            self._places.append(start + PART)
        self._places[-1] = len(commas)
        return total

    def end_of(self, tokens: int) -> int:
        """The offset after the first `tokens` ids."""
        data, behind = self.data, self.tokens - tokens
        if behind <= 0:
            return len(data)
        if tokens <= _FEW:
            return _nth_comma(data, 0, tokens + 1)
        if behind <= _FEW:
            return _nth_last_comma(data, behind)
        if self._commas is None and len(data) > LONG:
            self._mark()
        counts, places, commas = self._counts, self._places, self._commas
        mark = bisect_right(counts, tokens)
        if mark == len(counts):
            return len(data)
        begin, before = places[mark - 1], counts[mark - 1]
        offset = (
            begin + (places[mark] - begin) * (tokens - before) // (counts[mark] - before) - _EARLY
        )
        if offset <= begin:
            offset, nth = begin, tokens - before + 1
        elif commas is None:
            nth = tokens - before - data.count(COMMA, begin, offset) + 1
        else:
            nth = tokens - before - (adler32(commas[begin:offset]) & _SUM) + 2
        if nth <= 0:  # the estimate was too high
            offset, nth = begin, tokens - before + 1
        near = data[offset : offset + _ID_BYTES * nth].split(COMMA, nth)
        if len(near) > nth:
            place = min(offset + _ID_BYTES * nth, len(data)) - len(near[-1]) - 1
        else:
            place = _nth_comma(data, offset, nth)
        counts.insert(mark, tokens)
        places.insert(mark, place)
        return place


def _nth_comma(data: bytes, begin: int, nth: int) -> int:
    """Offset of the n-th comma from `begin` on, or the end."""
    near = data[begin : begin + _ID_BYTES * nth].split(COMMA, nth)
    if len(near) <= nth:
        near = data[begin:].split(COMMA, nth)
        return len(data) - (len(near[-1]) + 1 if len(near) > nth else 0)
    return min(begin + _ID_BYTES * nth, len(data)) - len(near[-1]) - 1


def _nth_last_comma(data: bytes, nth: int) -> int:
    """Offset of the n-th comma from the end, or 0."""
    start = max(0, len(data) - _ID_BYTES * nth)
    near = data[start:].rsplit(COMMA, nth)
    if len(near) <= nth:
        start = 0
        near = data.rsplit(COMMA, nth)
    return start + len(near[0])
