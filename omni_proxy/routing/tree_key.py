"""Keys of texts in the prefix tree: the first bytes of a text, and hashes of the blocks after them.

    text   | 1,024 bytes, plain | blocks of 64 bytes … growing to 512 …  | less than a block
    key    | the same           | 8 bytes for each                       | nothing

Keys are shorter (48 KB give 2 KB), and common prefixes of texts give common prefixes of keys.
Invariant: the common length read from two keys is exact, or up to one block less; only for a
partial last block after equal blocks it may be more. Blocks are at most as large as those of
engines: 512 bytes are about 128 tokens. Hashes use the seed of `hash_with`, which must be secret:
with it a client could make texts that collide with those of others. A tree must not mix seeds.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise, repeat
from typing import Final

from xxhash import xxh3_64_digest

PLAIN: Final = 1024
HASH_BYTES: Final = 8
MAX_BLOCK: Final = 512
_MAX_BYTES: Final = 128 * 1024  # bytes after it are not in the key
_FINENESS: Final = 16  # a block is at most 1/16 of the text before it


def _block_ends() -> list[int]:
    ends = [PLAIN]
    while ends[-1] < _MAX_BYTES:
        before = 1 << (ends[-1].bit_length() - 1)
        ends.append(ends[-1] + min(MAX_BLOCK, before // _FINENESS))
    return ends


_seeds = repeat(0)

# Ends of the plain part and of each block after it.
_ENDS: Final = _block_ends()
_BLOCKS: Final = [slice(*ends) for ends in pairwise(_ENDS)]


def hash_with(seed: int) -> None:
    """Set the 64-bit seed for all later keys of this process; call before any key is in a tree."""
    global _seeds
    _seeds = repeat(seed)


def tree_key(text: bytes) -> bytes:
    """The key of a text."""
    if len(text) < _ENDS[1]:
        return text[:PLAIN]
    blocks = _BLOCKS[: bisect_right(_ENDS, len(text)) - 1]
    hashes = map(xxh3_64_digest, map(text.__getitem__, blocks), _seeds)
    return text[:PLAIN] + b"".join(hashes)


def key_length(length: int) -> int:
    """Bytes of the key for the first `length` bytes of its text; only whole blocks count."""
    if length <= PLAIN:
        return length
    return PLAIN + HASH_BYTES * (bisect_right(_ENDS, length) - 1)


def text_length(key_length: int) -> int:
    """Bytes of the text that the first `key_length` bytes of its key represent."""
    if key_length <= PLAIN:
        return key_length
    return _ENDS[(key_length - PLAIN) // HASH_BYTES]
