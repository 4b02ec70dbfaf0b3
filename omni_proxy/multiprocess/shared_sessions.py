"""Sticky sessions in shared memory, so that a key means the same worker in every process.

An eight-way set-associative table: two words for each session, the key's mark with its worker, and
when it was used last; a new key replaces the one of its bucket that was idle longest. Invariant: a
word is written whole; of two processes that begin the same session at once the later one wins, and
both use its worker from then on.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from typing import Final

from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.replicated_fleet import SharedWorker

MAX_SESSIONS: Final = 10_000_000  # the upper bound of [routing] sticky_max
WAYS: Final = 8
WORD_BYTES: Final = 8
SERIAL_BITS: Final = 24
SERIALS: Final = (1 << SERIAL_BITS) - 1
SAMPLED_BUCKETS: Final = 64  # buckets, from which the size is estimated


def create_sessions() -> int:
    """The descriptor of memory for all of them, allocated by use. Raises OSError."""
    descriptor = os.memfd_create("omni-proxy-sessions", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * WORD_BYTES * MAX_SESSIONS)
    return descriptor


class SharedSessions:
    """`find_worker`: a worker by its serial number. A change of the bound drops all sessions."""

    def __init__(self, descriptor: int, find_worker: Callable[[int], Worker | None]) -> None:
        self._words = memoryview(mmap.mmap(descriptor, 2 * WORD_BYTES * MAX_SESSIONS)).cast("Q")
        self._find_worker = find_worker
        self._buckets = 1
        self._idle_ms = 0

    def tune(self, most: int, idle_secs: float) -> None:
        self._buckets = max(1, most // WAYS)
        self._idle_ms = int(idle_secs * 1000)

    def find(self, key: str, now: float) -> Worker | None:
        words, (places, mark) = self._words, self._places_of(key)
        for place in places:
            word = words[place]
            if word and word >> SERIAL_BITS == mark:
                if self._idle(words[place + 1], now):
                    return None
                return self._find_worker(word & SERIALS)
        return None

    def keep(self, key: str, worker: Worker, now: float) -> None:
        if not isinstance(worker, SharedWorker):
            return
        words, (places, mark) = self._words, self._places_of(key)
        oldest, used = -1, -1
        for place in places:
            word = words[place]
            if not word or word >> SERIAL_BITS == mark:
                oldest = place
                break
            if oldest < 0 or words[place + 1] < used:
                oldest, used = place, words[place + 1]
        words[oldest + 1] = int(now * 1000)
        words[oldest] = mark << SERIAL_BITS | worker.serial & SERIALS

    def maintain(self, now: float) -> None:
        """Does nothing: an idle session is ignored, and replaced first."""

    def __len__(self) -> int:
        """An estimate."""
        sampled = min(SAMPLED_BUCKETS, self._buckets)
        words = self._words
        used = sum(1 for place in range(sampled * WAYS) if words[2 * place])
        return used * self._buckets // sampled

    def _places_of(self, key: str) -> tuple[range, int]:
        """The words of its bucket, and the mark of the key in it, never 0."""
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        bucket = int.from_bytes(digest[:8], "big") % self._buckets
        first = bucket * WAYS * 2
        mark = int.from_bytes(digest[8:13], "big") or 1
        return range(first, first + WAYS * 2, 2), mark

    def _idle(self, used: int, now: float) -> bool:
        return 0 < self._idle_ms < now * 1000 - used
