"""Our own names of blocks: a hash of the block's tokens, chained to that of the block before.

Equal tokens behind equal tokens give equal keys, whatever engine computed them, so no agreement
with an engine's hash or its seed is needed. Invariant: keys are the same in every process of one
build: Python hashes integers, and tuples of them, without a seed. Must not be stored or sent to
another build.
"""

from __future__ import annotations

from collections.abc import Sequence


def root_key(block_size: int) -> int:
    """What the first block is chained to: blocks of different sizes never share a key."""
    return hash((0x6B76_6576_656E_7473, block_size))


def extend_keys(key: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """The keys of the whole blocks of `tokens`, which follow the block with `key`; tokens beyond
    the last whole block have none."""
    # Tuples of `block_size` tokens each, made and hashed without a step of Python for each.
    contents = map(hash, zip(*[iter(tokens)] * block_size, strict=False))
    return [key := hash((key, content)) for content in contents]


def block_keys(tokens: Sequence[int], block_size: int) -> list[int]:
    """The keys of a prompt's whole blocks, the first one first."""
    return extend_keys(root_key(block_size), tokens, block_size)
