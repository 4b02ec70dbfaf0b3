"""Our own names of blocks: a checksum of all token ids up to the block's end, as JSON spells them.

    spelling of a prompt  b",5,17,…,9": each id with a comma before it
    key of a block        CRC-32 of it to the block's end, 12 bits of its length, 20 of its end

Equal tokens give equal keys, whatever engine computed them, and a prompt that a request spells is
read once for them (`prompt_blocks`). Invariants: a key is all that is needed to go on with the next
block; keys are the same in every process of one build. Who wants two prompts with one key can make
them, and gets requests to a worker that has computed another one, no more. Must not be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final
from zlib import crc32

import msgspec
from xxhash import xxh32_intdigest

_TAIL_BITS: Final = 20
_TAIL_MASK: Final = (1 << _TAIL_BITS) - 1
_LENGTH_MASK: Final = (1 << 32) - 1 - _TAIL_MASK
_MOST_TAIL: Final = 32
_encode = msgspec.json.Encoder().encode


def tail_bytes(block_size: int) -> int:
    """So many at least spell a block of this many ids."""
    return min(2 * block_size, _MOST_TAIL)


def root_key(block_size: int) -> int:
    """What the first block goes on from: blocks of different sizes never share a key."""
    return crc32(b"%d" % block_size) << 32


def extend_key(key: int, spelled: bytes | memoryview, last: bytes) -> int:
    """The key behind `key`, so many bytes further: a whole number of blocks. `last`: their last
    `tail_bytes`."""
    return (
        crc32(spelled, key >> 32) << 32
        | key + (len(spelled) << _TAIL_BITS) & _LENGTH_MASK
        | xxh32_intdigest(last) & _TAIL_MASK
    )


def spell(tokens: Sequence[int]) -> bytes:
    """As in the keys."""
    return b"," + _encode(list(tokens))[1:-1] if tokens else b""


def extend_keys(key: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """The keys of the whole blocks of `tokens`, which follow the block with `key`; tokens beyond
    the last whole block have none."""
    ends, tail = range(0, len(tokens) + 1, block_size), tail_bytes(block_size)
    blocks = [spell(tokens[at:end]) for at, end in pairwise(ends)]
    return [key := extend_key(key, block, block[-tail:]) for block in blocks]


def block_keys(tokens: Sequence[int], block_size: int) -> list[int]:
    """The keys of a prompt's whole blocks, the first one first."""
    return extend_keys(root_key(block_size), tokens, block_size)
