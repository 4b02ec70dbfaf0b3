"""The blocks of a prompt, from the bytes that spell it: no token id is read as a number.

A block's key covers all that is before it, so a match looks at a few blocks of a prompt and sums
the bytes between them, instead of naming each. Invariant: `key(n)` is what `block_keys` gives for
the same tokens. Takes time in proportion to the bytes up to the block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Final

from omni_proxy.routing.kv_events.block_keys import extend_key, root_key

COMMA: Final = b","
# An id with its comma is shorter, so that looking for the next few has a bound; any other spelling
# is found too, by looking further.
_ID_BYTES: Final = 12
_STATE_BYTES: Final = 200


class PromptBlocks:
    """Of so many `tokens`, spelled with a comma before each, in blocks of one size. `most`: only so
    many tokens count."""

    __slots__ = ("_spelled", "_states", "count", "size", "tokens")

    def __init__(self, spelled: bytes, tokens: int, size: int, most: int | None = None) -> None:
        self.size = size
        self.tokens = tokens
        self.count = (tokens if most is None else min(most, tokens)) // size  # of whole blocks
        self._spelled = spelled
        # Number of a block: where it ends in the spelling, and its key.
        self._states: dict[int, tuple[int, int]] = {0: (0, root_key(size))}

    def key(self, number: int, after: int = 0) -> int:
        """Of block `number`, from 1 to `count`. `after`: one before it whose key was asked for."""
        state = self._states.get(number)
        if state is None:
            begin, key = self._states[after]
            end = self._end_of(number, after, begin)
            state = (end, extend_key(key, self._spelled[begin:end]))
            self._states[number] = state
        return state[1]

    def each_key(self) -> Iterator[int]:
        """Of all blocks, the first one first. Where the caller stops, that block and the one before
        it count as asked for."""
        number, end, key = 0, 0, self._states[0][1]
        before = (end, key)
        try:
            for block in islice(_blocks_of(self.size)(self._spelled), self.count):
                before = (end, key)
                number, end, key = number + 1, block.end(), extend_key(key, block[0])
                yield key
        finally:
            if number:
                self._states[number - 1], self._states[number] = before, (end, key)

    @property
    def memory(self) -> int:
        """Bytes, about."""
        return len(self._spelled) + _STATE_BYTES * len(self._states)

    def looked_at(self, held: int) -> list[int]:
        """The keys that were asked for, of blocks behind the first `held`."""
        return [key for number, (_, key) in self._states.items() if number > held]

    def common(self, other: PromptBlocks) -> int:
        """How many leading blocks both have, which are of one size."""
        if other is self or other._spelled == self._spelled:
            return min(self.count, other.count)
        ours, theirs = self._spelled, other._spelled
        low, high = 0, min(len(ours), len(theirs))
        while low < high:  # so many bytes are equal, and no more than so many
            at = (low + high + 1) >> 1
            if ours[low:at] == theirs[low:at]:
                low = at
            else:
                high = at - 1
        tokens = ours.count(COMMA, 0, low)
        if not (_ends(ours, low) and _ends(theirs, low)):
            tokens -= 1  # the last one goes on, in one of them
        return min(tokens // self.size, self.count, other.count)

    def _end_of(self, number: int, after: int, begin: int) -> int:
        """Where a block ends. The commas between are counted up to about there."""
        spelled, length, size = self._spelled, len(self._spelled), self.size
        behind = self.tokens - number * size
        if behind < size:
            return _nth_last_comma(spelled, begin, length, behind) if behind else length
        tokens = (number - after) * size
        at = begin + (length - begin) * tokens // (tokens + behind)
        missing = tokens - spelled.count(COMMA, begin, at)
        if missing >= 0:  # the comma behind so many more
            return _nth_comma(spelled, at, missing + 1)
        return _nth_last_comma(spelled, begin, at, -missing)


@lru_cache(maxsize=64)
def _blocks_of(size: int) -> Callable[[bytes], Iterator[re.Match[bytes]]]:
    return re.compile(rb"(?:,[^,]++){%d}" % size).finditer


def _nth_comma(spelled: bytes, begin: int, nth: int) -> int:
    near = spelled[begin : begin + _ID_BYTES * nth].split(COMMA, nth)
    if len(near) <= nth:
        near = spelled[begin:].split(COMMA, nth)
        if len(near) <= nth:
            return len(spelled)
        return len(spelled) - len(near[-1]) - 1
    return min(len(spelled), begin + _ID_BYTES * nth) - len(near[-1]) - 1


def _nth_last_comma(spelled: bytes, begin: int, end: int, nth: int) -> int:
    start = max(begin, end - _ID_BYTES * nth)
    near = spelled[start:end].rsplit(COMMA, nth)
    if len(near) <= nth:
        start = begin
        near = spelled[start:end].rsplit(COMMA, nth)
    return start + len(near[0])


def _ends(spelled: bytes, at: int) -> bool:
    """Whether an id ends there."""
    return at == len(spelled) or spelled.startswith(COMMA, at)
