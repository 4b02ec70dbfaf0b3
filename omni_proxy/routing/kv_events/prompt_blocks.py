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
from omni_proxy.routing.kv_events.spelled_ids import COMMA, SpelledIds

_STATE_BYTES: Final = 200


class PromptBlocks:
    """Of so many `tokens`, in blocks of one size. `most`: only so many tokens count."""

    __slots__ = ("_ids", "_states", "count", "size", "tokens")

    def __init__(self, ids: SpelledIds, size: int, most: int | None = None) -> None:
        tokens = ids.tokens
        self.size = size
        self.tokens = tokens
        self.count = (tokens if most is None else min(most, tokens)) // size  # of whole blocks
        self._ids = ids
        # Number of a block: where it ends in the spelling, and its key.
        self._states: dict[int, tuple[int, int]] = {0: (0, root_key(size))}

    def key(self, number: int, after: int = 0) -> int:
        """Of block `number`, from 1 to `count`. `after`: one before it whose key was asked for."""
        state = self._states.get(number)
        if state is None:
            begin, key = self._states[after]
            end = self._ids.end_of(number * self.size)
            state = (end, extend_key(key, self._ids.view[begin:end]))
            self._states[number] = state
        return state[1]

    def each_key(self) -> Iterator[int]:
        """Of all blocks, the first one first. Where the caller stops, that block and the one before
        it count as asked for."""
        number, end, key = 0, 0, self._states[0][1]
        before = (end, key)
        try:
            for block in islice(_blocks_of(self.size)(self._ids.spelled), self.count):
                before = (end, key)
                number, end, key = number + 1, block.end(), extend_key(key, block[0])
                yield key
        finally:
            if number:
                self._states[number - 1], self._states[number] = before, (end, key)

    @property
    def memory(self) -> int:
        """Bytes, about."""
        return len(self._ids.spelled) + _STATE_BYTES * len(self._states)

    def looked_at(self, held: int) -> list[int]:
        """The keys that were asked for, of blocks behind the first `held`."""
        return [key for number, (_, key) in self._states.items() if number > held]

    def common(self, other: PromptBlocks) -> int:
        """How many leading blocks both have, which are of one size."""
        ours, theirs = self._ids.spelled, other._ids.spelled
        if ours == theirs:
            return min(self.count, other.count)
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


@lru_cache(maxsize=64)
def _blocks_of(size: int) -> Callable[[bytes], Iterator[re.Match[bytes]]]:
    return re.compile(rb"(?:,[^,]++){%d}" % size).finditer


def _ends(spelled: bytes, at: int) -> bool:
    """Whether an id ends there."""
    return at == len(spelled) or spelled.startswith(COMMA, at)
