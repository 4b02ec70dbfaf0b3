"""Prefix cache: keys and values of finished sequences, reused for prompts with a common prefix.

Invariant: never more entries or bytes than allowed, and no entry is a prefix of another. A query
returns a copy, so an entry is never written to. Only what was computed in the current epoch (that
is, with the current weights) is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class CacheableKV(Protocol):
    """The interface of a KV that can be cached; `length` counts tokens."""

    @property
    def length(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def fork(self, length: int) -> CacheableKV: ...


class CacheListener(Protocol):
    """Called after each change of the entries, in the thread that made it."""

    def on_stored(self, tokens: tuple[int, ...], dropped: Sequence[tuple[int, ...]]) -> None:
        """An entry with `tokens` was stored; the entries in `dropped` were evicted for it."""

    def on_cleared(self) -> None: ...


KV = TypeVar("KV", bound=CacheableKV)


@dataclass(frozen=True, slots=True)
class _Entry(Generic[KV]):
    tokens: tuple[int, ...]
    kv: KV


class PrefixCache(Generic[KV]):
    """Evicts the least recently used entry first; doesn't reuse prefixes below `min_tokens`."""

    def __init__(self, max_entries: int, max_bytes: int, min_tokens: int = 16) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._min_tokens = min_tokens
        self._entries: list[_Entry[KV]] = []  # the most recently used last
        self.epoch = 0
        self.listener: CacheListener | None = None

    @property
    def enabled(self) -> bool:
        return self._max_entries > 0 and self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return sum(entry.kv.nbytes for entry in self._entries)

    def copy_longest_prefix(self, tokens: Sequence[int]) -> KV | None:
        """Return a copy of the KV with the longest common prefix with `tokens`, or None.

        It never covers the last token, which has to be computed for its logits.
        """
        wanted = tuple(tokens[:-1])
        best, length = None, max(self._min_tokens, 1) - 1
        for entry in reversed(self._entries):
            shared = common_length(entry.tokens, wanted)
            if shared > length:
                best, length = entry, shared
        if best is None:
            return None
        self._touch(best)
        copy: KV = best.kv.fork(length)  # type: ignore[assignment]  # a KV forks into its own type
        return copy

    def store(self, tokens: Sequence[int], kv: KV, epoch: int) -> bool:
        """Store the KV of exactly `tokens`, begun in `epoch`; return whether it was stored."""
        key = tuple(tokens)
        if epoch != self.epoch or len(key) < self._min_tokens:
            return False
        if kv.nbytes > self._max_bytes or self._max_entries < 1:
            return False
        for entry in self._entries:
            if entry.tokens[: len(key)] == key:
                self._touch(entry)
                return False
        dropped = [other for other in self._entries if key[: len(other.tokens)] == other.tokens]
        self._entries = [
            other for other in self._entries if key[: len(other.tokens)] != other.tokens
        ]
        self._entries.append(_Entry(key, kv))
        while len(self) > self._max_entries or self.nbytes > self._max_bytes:
            dropped.append(self._entries.pop(0))
        if self.listener is not None:
            self.listener.on_stored(key, [other.tokens for other in dropped])
        return True

    def flush(self) -> int:
        """Drop all entries and begin a new epoch, so that a KV in computation is never stored.

        Returns the number of entries dropped.
        """
        dropped = len(self)
        self._entries = []
        self.epoch += 1
        if self.listener is not None:
            self.listener.on_cleared()
        return dropped

    def _touch(self, entry: _Entry[KV]) -> None:
        self._entries = [other for other in self._entries if other is not entry]
        self._entries.append(entry)


def common_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Length of the longest common prefix; compares slices, not tokens, for speed."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
