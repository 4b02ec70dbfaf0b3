"""Our own names of blocks: checksums of all token ids up to the block's end, as JSON spells them.

    key of a block = CRC-32 and Adler-32 of b",5,17,…,9": each id with a comma before it

Equal tokens give equal keys, whatever engine computed them, so no agreement with an engine's hash
or its seed is needed; and a prompt that a request spells needs not be read for them
(`prompt_blocks`). Invariants: a key is all that is needed to go on with the next block; keys are
the same in every process of one build. Both sums are linear: who wants two prompts with one key can
make them, and gets requests to a worker that has computed another one, no more. Must not be stored
or sent to another build.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final
from zlib import adler32, crc32

import msgspec

_ADLER_MASK: Final = (1 << 32) - 1
_encode = msgspec.json.Encoder().encode


def root_key(block_size: int) -> int:
    """What the first block goes on from: blocks of different sizes never share a key."""
    return crc32(b"%d" % block_size) << 32 | 1


def extend_key(key: int, spelled: bytes | memoryview) -> int:
    """The key behind `key`, so many bytes further."""
    return crc32(spelled, key >> 32) << 32 | adler32(spelled, key & _ADLER_MASK)


def spell(tokens: Sequence[int]) -> bytes:
    """As in the keys."""
    return b"," + _encode(list(tokens))[1:-1] if tokens else b""


def extend_keys(key: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """The keys of the whole blocks of `tokens`, which follow the block with `key`; tokens beyond
    the last whole block have none."""
    ends = range(0, len(tokens) + 1, block_size)
    return [key := extend_key(key, spell(tokens[at:end])) for at, end in pairwise(ends)]


def block_keys(tokens: Sequence[int], block_size: int) -> list[int]:
    """The keys of a prompt's whole blocks, the first one first."""
    return extend_keys(root_key(block_size), tokens, block_size)
