"""The blocks that one engine has cached, by its own names: our keys, and how they hang together.

Invariant: `has_holes` is true exactly while some block is held that stands behind one that is not.
Source: features.md 7 (media, removals).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from omni_proxy.routing.kv_events.event_payload import StoredEvent

# Where the engine can use a block without computing or fetching it over a network.
MEDIA: Final = ("", "GPU", "CPU", "CPU_TIER1", "CPU_TIER2", "CPU_PINNED")
# A block is one integer, a fraction of a tuple's memory: its key, the engine's name of the block
# before it, how many known blocks stand behind it, and a bit for each of MEDIA that has it.
_MEDIA_BITS: Final = 8
_MEDIA_MASK: Final = (1 << _MEDIA_BITS) - 1
_ONE_BEHIND: Final = 1 << _MEDIA_BITS
_BEHIND_BITS: Final = 24
_BEHIND_MASK: Final = (1 << _BEHIND_BITS) - 1
_NAME_AT: Final = _MEDIA_BITS + _BEHIND_BITS
_NAME_MASK: Final = (1 << 64) - 1
_KEY_AT: Final = _NAME_AT + 64 + 1  # one bit more: whether there is a block before it
_HAS_PARENT: Final = 1 << (_KEY_AT - 1)


class NameReused(Exception):
    """One name for blocks with different tokens."""


class EngineBlocks:
    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}  # by name, oldest first
        self._missing: dict[int, int] = {}  # blocks that are gone, and how many stand behind each

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        """The names, of those stored first first."""
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
        """The keys that are new; there may be fewer `keys` than names. The block before the first
        one is held. Raises NameReused."""
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
        """Those of the names that no medium has any more; "" for all media."""
        bit = 1 << MEDIA.index(medium) if medium else -1
        gone: list[int] = []
        for name in names:
            known = self._blocks.get(name)
            if known is None:
                continue
            # One that was stored without a medium is gone with any.
            media = known & _MEDIA_MASK & ~bit & ~1
            if media:
                self._blocks[name] = known & ~_MEDIA_MASK | media
            else:
                gone.append(name)
        return gone

    def remove(self, names: Iterable[int]) -> list[int]:
        """The keys of those that were held."""
        keys: list[int] = []
        for name in names:
            block = self._blocks.pop(name, None)
            if block is None:
                continue  # it was named twice
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
        """One block less stands behind it."""
        if parent in self._blocks:
            self._blocks[parent] -= _ONE_BEHIND
            return
        left = self._missing.get(parent, 0) - 1
        if left > 0:
            self._missing[parent] = left
        else:
            self._missing.pop(parent, None)
