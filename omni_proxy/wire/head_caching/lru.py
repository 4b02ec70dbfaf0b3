"""Bounded tables: an LRU cache, and TinyLFU's doorkeeper, which admits keys seen twice.

Invariant: no table exceeds its limit, and a new entry evicts the least recently used one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most `max_entries` entries; the least recently used one is evicted first."""

    __slots__ = ("_entries", "_max_entries")

    def __init__(self, max_entries: int) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._max_entries = max_entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The entry, which counts as used now; None if there is none."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)


class Doorkeeper:
    """Whether a key was seen before, among the last `max_entries` new keys.

    It stores only hashes: a collision admits one key too early, and has no other effect.
    """

    __slots__ = ("_max_entries", "_seen")

    def __init__(self, max_entries: int) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._max_entries = max_entries

    def admits(self, key: Hashable) -> bool:
        """False the first time, True the second time, which also removes the key."""
        hashed = hash(key)
        if hashed in self._seen:
            del self._seen[hashed]
            return True
        if len(self._seen) >= self._max_entries:
            self._seen.popitem(last=False)
        self._seen[hashed] = None
        return False
