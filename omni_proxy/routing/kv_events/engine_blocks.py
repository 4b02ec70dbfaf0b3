"""The blocks that one engine has cached, by the engine's hashes ("names"): their keys and parents;
and changes of cached blocks, made by `publisher_state`, applied by `block_index`, and packed to be
sent between processes.

Invariant: `has_holes` is true if and only if some block is held whose parent is not. Changes of one
holder are applied in their order. Must not be saved: keys are valid only within one build. Source:
note:features 7 (media, removals).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from omni_proxy.routing.kv_events.event_payload import StoredEvent

# Media from which the engine can use a block without computing it or a transfer over a network.
MEDIA: Final = ("", "GPU", "CPU", "CPU_TIER1", "CPU_TIER2", "CPU_PINNED")
# A block is one integer, which takes much less memory than a tuple: its key, the engine's name of
# its parent, the number of its known children, and a bit for each of MEDIA that has it.
_MEDIA_BITS: Final = 8
_MEDIA_MASK: Final = (1 << _MEDIA_BITS) - 1
_ONE_BEHIND: Final = 1 << _MEDIA_BITS
_BEHIND_BITS: Final = 24
_BEHIND_MASK: Final = (1 << _BEHIND_BITS) - 1
_NAME_AT: Final = _MEDIA_BITS + _BEHIND_BITS
_NAME_MASK: Final = (1 << 64) - 1
_KEY_AT: Final = _NAME_AT + 64 + 1  # one bit more: whether it has a parent
_HAS_PARENT: Final = 1 << (_KEY_AT - 1)


class NameReused(Exception):
    """The engine used one name for blocks with different tokens."""


class EngineBlocks:
    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}  # by name, oldest first
        self._missing: dict[int, int] = {}  # removed blocks with children, and the number of these

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        """The names, in the order in which they were stored."""
        return iter(self._blocks)

    @property
    def has_holes(self) -> bool:
        return bool(self._missing)

    def keys(self) -> list[int]:
        return [block >> _KEY_AT for block in self._blocks.values()]

    def key_of(self, name: int) -> int | None:
        block = self._blocks.get(name)
        return None if block is None else block >> _KEY_AT

    def store(self, event: StoredEvent, keys: Iterable[int]) -> list[int]:
        """Store blocks and return the new keys; there may be fewer `keys` than names. The parent of
        the first one must be held. Raises NameReused."""
        medium, parent, new = 1 << MEDIA.index(event.medium), event.parent, list[int]()
        for key, name in zip(keys, event.hashes, strict=False):
            known = self._blocks.get(name)
            if known is None:
                new.append(key)
                behind = self._missing.pop(name, 0) << _MEDIA_BITS
                before = 0
                if parent is not None:
                    self._blocks[parent] += _ONE_BEHIND
                    before = parent << _NAME_AT | _HAS_PARENT
                self._blocks[name] = key << _KEY_AT | before | behind | medium
            elif known >> _KEY_AT != key:
                raise NameReused
            elif not known & medium:
                self._blocks[name] = known | medium
            parent = name
        return new

    def leave_medium(self, names: Iterable[int], medium: str) -> list[int]:
        """Remove the medium ("": all media) from these blocks; returns names of blocks without any
        medium left, which the caller removes."""
        bit = 1 << MEDIA.index(medium) if medium else -1
        gone: list[int] = []
        for name in names:
            known = self._blocks.get(name)
            if known is None:
                continue
            # A block that was stored without a medium is removed with any medium.
            media = known & _MEDIA_MASK & ~bit & ~1
            if media:
                self._blocks[name] = known & ~_MEDIA_MASK | media
            else:
                gone.append(name)
        return gone

    def remove(self, names: Iterable[int]) -> list[int]:
        """Remove blocks; returns the keys of those that were held."""
        keys: list[int] = []
        for name in names:
            block = self._blocks.pop(name, None)
            if block is None:
                continue  # named twice, or unknown
            keys.append(block >> _KEY_AT)
            behind = block >> _MEDIA_BITS & _BEHIND_MASK
            if behind:
                self._missing[name] = behind
            if block & _HAS_PARENT:
                self._leave(block >> _NAME_AT & _NAME_MASK)
        return keys

    def clear(self) -> None:
        self._blocks = {}
        self._missing = {}

    def _leave(self, parent: int) -> None:
        """Decrement the number of children of `parent`."""
        if parent in self._blocks:
            self._blocks[parent] -= _ONE_BEHIND
            return
        left = self._missing.get(parent, 0) - 1
        if left > 0:
            self._missing[parent] = left
        else:
            self._missing.pop(parent, None)


class ChangeOp(IntEnum):
    """The kind of a `HeldChange`."""

    RESET = 0
    STORE = 1
    REMOVE = 2
    EXACT = 3
    INEXACT = 4
    BLOCK_SIZE = 5
    FORGET = 6  # the worker is no longer followed
    HOLES = 7  # some block is held without the block before it
    NO_HOLES = 8


class HeldChange(NamedTuple):
    """`values`: keys of blocks for STORE and REMOVE, the size for BLOCK_SIZE, else nothing."""

    op: ChangeOp
    values: list[int]


PackedChanges: TypeAlias = list[tuple[int, bytes]]  # between processes of one machine
MAX_PACKED: Final = 1024  # values of one change, so that applying one never takes long


def pack_changes(changes: Iterable[HeldChange]) -> Iterator[tuple[int, bytes]]:
    """Long changes are split."""
    for op, values in changes:
        for start in range(0, max(1, len(values)), MAX_PACKED):
            yield int(op), array("Q", values[start : start + MAX_PACKED]).tobytes()


def unpack_changes(packed: Iterable[tuple[int, bytes]]) -> Iterator[HeldChange]:
    for op, values in packed:
        numbers = array("Q")
        numbers.frombytes(values)
        yield HeldChange(ChangeOp(op), numbers.tolist())
