"""The blocks of tokens that a prefix cache holds, and events for stored and removed blocks. Pure.

A block is `block_size` tokens. Its hash covers its tokens and all blocks before it, so equal hashes
mean equal prefixes, in every replica and after a restart. Invariant: a block is held while at least
one cache entry has all of its tokens; a reader of all events knows exactly the blocks of `held`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

HASH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks, each the parent of the next; `parent` is None at the beginning of a text.

    `tokens` are those of all of them, `block_size` for each hash.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """The last blocks of a text come first, so that no block ever lacks its parent."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    pass


BlockEvent: TypeAlias = BlocksStored | BlocksRemoved | AllCleared


def block_hashes(tokens: Sequence[int], block_size: int) -> Iterator[int]:
    """The hashes of the complete blocks of a text, unsigned numbers of 64 bits."""
    parent = b""
    for end in range(block_size, len(tokens) + 1, block_size):
        block = array("q", tokens[end - block_size : end]).tobytes()
        parent = blake2b(block, digest_size=HASH_BYTES, key=parent).digest()
        yield int.from_bytes(parent, "big")


class HeldBlocks:
    """Follows the entries of one cache."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chains: dict[tuple[int, ...], tuple[int, ...]] = {}  # by the tokens of an entry
        self._holders: Counter[int] = Counter()  # how many entries hold a block

    @property
    def held(self) -> set[int]:
        return set(self._holders)

    def change(
        self, added: tuple[int, ...], dropped: Iterable[tuple[int, ...]]
    ) -> list[BlockEvent]:
        """One entry was stored and others evicted for it; events of the removals come first."""
        chain = tuple(block_hashes(added, self._block_size))
        known = next((at for at, each in enumerate(chain) if not self._holders[each]), len(chain))
        self._chains[added] = chain
        self._holders.update(chain)
        gone: list[int] = []
        for tokens in dropped:
            gone += self._let_go(self._chains.pop(tokens))
        events: list[BlockEvent] = [BlocksRemoved(tuple(gone))] if gone else []
        if known < len(chain):
            new = added[known * self._block_size : len(chain) * self._block_size]
            events.append(BlocksStored(chain[known:], chain[known - 1] if known else None, new))
        return events

    def clear(self) -> list[BlockEvent]:
        self._chains.clear()
        self._holders.clear()
        return [AllCleared()]

    def _let_go(self, chain: tuple[int, ...]) -> Iterator[int]:
        for each in reversed(chain):
            self._holders[each] -= 1
            if not self._holders[each]:
                del self._holders[each]
                yield each
