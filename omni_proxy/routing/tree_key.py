"""What the prefix tree keeps of a text: its beginning as it is, and hashes of the blocks behind it.

    text   | 1,024 bytes, plain | blocks of 64 bytes … growing to 512 …  | less than a block
    key    | the same           | 8 bytes for each                       | nothing

So a prompt of 48 KB takes 2 KB, and two texts have as much of their keys in common as of their
blocks. Invariants: a length that is read from a key is never more than what the texts have in
common, but for the end of a text, shorter than a block, behind blocks that are all equal; nor is it
less by more than a block. Blocks grow no larger than those of engines: 512 bytes are about 128
tokens. Hashes have the seed of `hash_with`, which callers keep secret: a client that knew it could
make texts that pass for those of others. Keys of another seed must not meet these in a tree.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise, repeat
from typing import Final

from xxhash import xxh3_64_digest

PLAIN: Final = 1024
HASH_BYTES: Final = 8
MOST_BLOCK: Final = 512
_LONGEST: Final = 128 * 1024  # bytes behind it are not in the key
_FINENESS: Final = 16  # a block is at most such a share of what lies before it


def _block_ends() -> list[int]:
    ends = [PLAIN]
    while ends[-1] < _LONGEST:
        before = 1 << (ends[-1].bit_length() - 1)
        ends.append(ends[-1] + min(MOST_BLOCK, before // _FINENESS))
    return ends


_seeds = repeat(0)

# Where the plain part ends, and each block behind it.
_ENDS: Final = _block_ends()
_BLOCKS: Final = [slice(*ends) for ends in pairwise(_ENDS)]


def hash_with(seed: int) -> None:
    """All later keys of this process; 64 bits. Before any key is in a tree."""
    global _seeds
    _seeds = repeat(seed)


def tree_key(text: bytes) -> bytes:
    """Takes a third of a microsecond for each KB."""
    if len(text) < _ENDS[1]:
        return text[:PLAIN]
    blocks = _BLOCKS[: bisect_right(_ENDS, len(text)) - 1]
    hashes = map(xxh3_64_digest, map(text.__getitem__, blocks), _seeds)
    return text[:PLAIN] + b"".join(hashes)


def key_length(length: int) -> int:
    """How many bytes of its key the first `length` bytes of a text are, whole blocks alone."""
    if length <= PLAIN:
        return length
    return PLAIN + HASH_BYTES * (bisect_right(_ENDS, length) - 1)


def text_length(key_length: int) -> int:
    """How many bytes of text the first `key_length` bytes of its key stand for."""
    if key_length <= PLAIN:
        return key_length
    return _ENDS[(key_length - PLAIN) // HASH_BYTES]
