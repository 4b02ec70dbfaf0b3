"""The KV caches of the leader, mirrored by its followers.

The leader sends forks, truncations and ends of KVs with the next step (`KVJournal`). Invariant:
after that step, each KV that the leader holds has the same length at every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from torch import Tensor

from omni_proxy.replica.models.kv import KVShape, SequenceKV

FORK, TRUNCATE, FREE = "fork", "truncate", "free"
Entry = Sequence[Any]  # one of the three operations, then the number of the KV


class KVJournal:
    """Changes of the leader's KVs since the last step; any thread may free a KV."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._numbers = count()

    def number(self) -> int:
        return next(self._numbers)

    def note(self, *entry: Any) -> None:
        self._entries.append(entry)

    def take(self) -> list[Entry]:
        return [self._entries.popleft() for _ in range(len(self._entries))]


class MirroredKV(SequenceKV):
    """The leader's part of a sequence's keys and values; it records changes in the journal."""

    __slots__ = ("_journal", "number")

    def __init__(self, shape: KVShape, like: Tensor, journal: KVJournal) -> None:
        super().__init__(shape, like)
        self.number = journal.number()
        self._journal = journal

    def fork(self, length: int) -> MirroredKV:
        plain = super().fork(length)
        copy = MirroredKV(self.shape, self._store, self._journal)
        copy._hold(plain._store)
        copy.length = length
        self._journal.note(FORK, copy.number, self.number, length)
        return copy

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._journal.note(TRUNCATE, self.number, length)

    def __del__(self) -> None:
        journal = getattr(self, "_journal", None)  # missing if the allocation in __init__ failed
        if journal is not None:
            journal.note(FREE, self.number)


class KVMirror:
    """A follower's part of the leader's KVs; a KV that is new at the leader starts empty."""

    def __init__(self, new_kv: Callable[[], SequenceKV]) -> None:
        self._new_kv = new_kv
        self._kvs: dict[int, SequenceKV] = {}

    def __len__(self) -> int:
        return len(self._kvs)

    def apply(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            match entry:
                case (str(word), int(copy), int(number), int(length)) if word == FORK:
                    self._kvs[copy] = self.kv(number).fork(length)
                case (str(word), int(number), int(length)) if word == TRUNCATE:
                    self.kv(number).truncate(length)
                case (str(word), int(number)) if word == FREE:
                    self._kvs.pop(number, None)
                case _:
                    raise ValueError(f"invalid journal entry from the leader: {entry!r}")

    def kv(self, number: int) -> SequenceKV:
        if number not in self._kvs:
            self._kvs[number] = self._new_kv()
        return self._kvs[number]
