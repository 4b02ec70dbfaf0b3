"""The proxy's keys of blocks: a checksum of all token ids up to the block's end, as JSON text.

    text of a prompt  b",5,17,…,9": each id with a comma before it
    key of a block    CRC-32 of the text up to the block's end, 12 bits of its length, 20 of its end

Equal tokens give equal keys for every engine. `PromptBlocks` computes them in one pass over the
bytes of a prompt, without parsing ids. Invariants: a key is sufficient to compute the key of the
next block; keys are the same in every process of one build, and must not be saved. Collisions can
be made on purpose; they only misdirect requests to a worker without the prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from typing import Final
from zlib import crc32

import msgspec
from xxhash import xxh32_intdigest

from omni_proxy.routing.token_id_text import COMMA, TokenIdText

_TAIL_BITS: Final = 20
_TAIL_MASK: Final = (1 << _TAIL_BITS) - 1
_LENGTH_MASK: Final = (1 << 32) - 1 - _TAIL_MASK
_MAX_TAIL: Final = 32
_encode = msgspec.json.Encoder().encode


def tail_bytes(block_size: int) -> int:
    """The number of bytes at a block's end that its key covers: any block has at least as many."""
    return min(2 * block_size, _MAX_TAIL)


def root_key(block_size: int) -> int:
    """The key before the first block: it depends on the block size, so that blocks of different
    sizes have different keys."""
    return crc32(b"%d" % block_size) << 32


def extend_key(key: int, data: bytes | memoryview, last: bytes) -> int:
    """The key after `data`, a whole number of blocks that follow `key`. `last`: the last
    `tail_bytes` of `data`."""
    return (
        crc32(data, key >> 32) << 32
        | key + (len(data) << _TAIL_BITS) & _LENGTH_MASK
        | xxh32_intdigest(last) & _TAIL_MASK
    )


def encode_token_ids(tokens: Sequence[int]) -> bytes:
    """The text of token ids, as used in keys."""
    return b"," + _encode(list(tokens))[1:-1] if tokens else b""


def extend_keys(key: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """The keys of the whole blocks of `tokens`, which follow the block with `key`; tokens after the
    last whole block are ignored."""
    ends, tail = range(0, len(tokens) + 1, block_size), tail_bytes(block_size)
    blocks = [encode_token_ids(tokens[start:end]) for start, end in pairwise(ends)]
    return [key := extend_key(key, block, block[-tail:]) for block in blocks]


def block_keys(tokens: Sequence[int], block_size: int) -> list[int]:
    """The keys of a prompt's whole blocks, in order."""
    return extend_keys(root_key(block_size), tokens, block_size)


_STATE_BYTES: Final = 200


class PromptBlocks:
    """The blocks of a prompt, of one size in tokens. `limit`: only this many tokens count.

    A block's key covers all tokens before it, so a match computes the keys of only a few blocks,
    with one checksum of the bytes between them. Invariant: `key(n)` is the same as by `block_keys`
    for these tokens. Takes time in proportion to the bytes up to the block.
    """

    __slots__ = (
        "_end_of", "_states", "_tail", "_text", "_view", "computed_keys", "count", "size",
        "tokens",
    )  # fmt: skip

    def __init__(self, ids: TokenIdText, size: int, limit: int | None = None) -> None:
        tokens = ids.tokens
        self.size = size
        self.tokens = tokens
        self.count = (tokens if limit is None else min(limit, tokens)) // size  # of whole blocks
        self.computed_keys: set[int] = set()  # keys that were computed
        self._text, self._view, self._end_of = ids.data, ids.view, ids.end_of
        self._tail = tail_bytes(size)
        # Number of a block: its end offset in the text, and its key.
        self._states: dict[int, tuple[int, int]] = {0: (0, root_key(size))}

    def key(self, number: int, after: int = 0) -> int:
        """The key of block `number`, from 1 to `count`. `after`: an earlier block with a computed
        key, or 0."""
        state = self._states.get(number)
        if state is not None:
            return state[1]
        begin, before = self._states[after]
        end = self._end_of(number * self.size)
        last = self._text[end - self._tail : end]
        key = extend_key(before, self._view[begin:end], last)
        self._states[number] = (end, key)
        self.computed_keys.add(key)
        return key

    def last_key(self) -> int:
        """The key of the last block, if there is any."""
        return self.key(self.count, max(self._states))

    def each_key(self) -> Iterator[int]:
        """The keys of all blocks, in order. Where the caller stops, the keys of that block and of
        the one before it are added to `computed_keys`."""
        number, end, key, tail = 0, 0, self._states[0][1], self._tail
        before = (end, key)
        try:
            for match in islice(_blocks_of(self.size)(self._text), self.count):
                before, block = (end, key), match[0]
                number, end, key = number + 1, match.end(), extend_key(key, block, block[-tail:])
                yield key
        finally:
            if number:
                self._states[number - 1], self._states[number] = before, (end, key)
                self.computed_keys.update((before[1], key) if number > 1 else (key,))

    @property
    def memory(self) -> int:
        """Approximate bytes."""
        return len(self._text) + _STATE_BYTES * len(self._states)

    def common(self, other: PromptBlocks) -> int:
        """How many leading blocks both have in common; their block sizes are equal."""
        ours, theirs = self._text, other._text
        if ours == theirs:
            return min(self.count, other.count)
        low, high = 0, min(len(ours), len(theirs))
        while low < high:  # between `low` and `high` leading bytes are equal
            middle = (low + high + 1) >> 1
            if ours[low:middle] == theirs[low:middle]:
                low = middle
            else:
                high = middle - 1
        tokens = ours.count(COMMA, 0, low)
        if not (_ends(ours, low) and _ends(theirs, low)):
            tokens -= 1  # the last id is longer in one of them
        return min(tokens // self.size, self.count, other.count)


@lru_cache(maxsize=64)
def _blocks_of(size: int) -> Callable[[bytes], Iterator[re.Match[bytes]]]:
    return re.compile(rb"(?:,[^,]++){%d}" % size).finditer


def _ends(data: bytes, index: int) -> bool:
    """Whether an id ends there."""
    return index == len(data) or data.startswith(COMMA, index)
