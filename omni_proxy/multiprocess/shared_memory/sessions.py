"""Sticky sessions, in memory that all processes share.

Invariant: a key maps to the same worker in every process; if two processes begin a session
concurrently, the later write wins. There are no locks: a lost update of a count is corrected by the
main process, which scans the table in slices.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from msgspec import Struct

from omni_proxy.cluster.messages import target_key
from omni_proxy.cluster.session_places import FINISHED, SessionNotes, session_digest
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.shared_memory.worker_counters import CELLS
from omni_proxy.routing.pinning import MAX_RESPONSES
from omni_proxy.routing.policies.session_load import repeat_secs

MAX_SESSIONS: Final = 10_000_000  # the upper bound of [routing] sticky_max
WAYS: Final = 8
WORD_BYTES: Final = 8
SESSION_BYTES: Final = 2 * WORD_BYTES
SERIAL_BITS: Final = 24
SERIALS: Final = (1 << SERIAL_BITS) - 1
TABLE_BYTES: Final = SESSION_BYTES * MAX_SESSIONS
COUNTS_AT: Final = -(-TABLE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
COUNT_BYTES: Final = 4
ALL_BYTES: Final = COUNTS_AT + COUNT_BYTES * CELLS
SLICE_BYTES: Final = 256 * 1024


def create_sessions() -> int:
    """The descriptor of memory for all sessions, allocated on use. Raises OSError."""
    descriptor = os.memfd_create("omni-proxy-sessions", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, ALL_BYTES)
    return descriptor


@dataclass(frozen=True, slots=True)
class WorkerDirectory:
    """Workers by the ids that all processes share: `find` returns a worker by serial number, `ids`
    its serial number and cell, or None."""

    find: Callable[[int], Worker | None]
    ids: Callable[[Worker], tuple[int, int] | None]
    members: Callable[[], Iterable[Worker]]


def shared_response_owners(descriptor: int, workers: WorkerDirectory) -> SharedSessions:
    """A table like that of sessions, in its own memory, for the owners of stored responses."""
    owners = SharedSessions(descriptor, workers)
    owners.tune(MAX_RESPONSES, 0)
    return owners


class SharedRows(Struct, frozen=True):
    """Sessions of a table with `buckets` buckets: for each its last use by CLOCK_MONOTONIC in
    milliseconds, its bucket and mark as the 13 bytes of a digest, and the URL of its worker."""

    buckets: int
    sessions: tuple[tuple[int, int, str], ...]


class SharedSessions:
    """An eight-way set-associative table with two words per session: the key's mark with its
    worker, and the time of the last use. A new key replaces the one of its bucket that was idle
    longest. After the table there is a count for each worker. Words are written atomically. Counts
    are written without a lock: a count that lost an update, or includes expired sessions, is
    corrected by the next pass over the table, in the main process (`recounts`). A change of the
    bound drops all sessions. `slice_bytes`: how much of the table one call of `maintain` reads."""

    def __init__(
        self,
        descriptor: int,
        workers: WorkerDirectory,
        *,
        recounts: bool = False,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, ALL_BYTES)
        whole = memoryview(self._memory)
        self._words = whole[:TABLE_BYTES].cast("Q")
        self._counts = whole[COUNTS_AT:].cast("i")
        self._workers = workers
        self._recounts = recounts
        self._slice_bytes = slice_bytes
        self._buckets = 0
        self._idle_ms = 0
        self._recount = _Recount()
        self._notes: SessionNotes | None = None
        self._repeat_ms = 1

    def share(self, notes: SessionNotes, prefix: str) -> None:
        """`prefix` is not used: the keys already contain it."""
        self._notes = notes

    def tune(self, max_sessions: int, idle_secs: float) -> None:
        buckets = max(1, max_sessions // WAYS)
        if self._recounts and self._buckets and buckets != self._buckets:
            self._memory.madvise(mmap.MADV_REMOVE, 0, COUNTS_AT)
            self._recount = _Recount()
        self._buckets = buckets
        self._idle_ms = int(idle_secs * 1000)
        self._repeat_ms = max(1, int(1000 * repeat_secs(idle_secs)))

    def find(self, key: str, now: float) -> Worker | None:
        words, (places, mark) = self._words, self._places_of(session_digest(key))
        for place in places:
            word = words[place]
            if word and word >> SERIAL_BITS == mark:
                if self._idle(words[place + 1], now):
                    return None
                return self._workers.find(word & SERIALS)
        return None

    def keep(self, key: str, worker: Worker, now: float) -> None:
        ids = self._workers.ids(worker)
        if ids is None:
            return
        digest = session_digest(key)
        before, used = self._put(digest, ids, now)
        notes, repeat_ms = self._notes, self._repeat_ms
        if notes is None or not notes.enabled:
            return
        is_same = before & SERIALS == ids[0] & SERIALS
        if not is_same or used // repeat_ms != int(now * 1000) // repeat_ms:
            notes.note(digest, target_key(worker.url))

    def _put(self, digest: bytes, ids: tuple[int, int], now: float) -> tuple[int, int]:
        """Write a session; returns its previous word, 0 without one, and its previous last use."""
        words, (places, mark) = self._words, self._places_of(digest)
        chosen, longest = -1, 0
        for place in places:
            word = words[place]
            if word >> SERIAL_BITS == mark:
                chosen = place
                break
            used = words[place + 1] if word else -1
            if chosen < 0 or used < longest:
                chosen, longest = place, used
        before, session = words[chosen], mark << SERIAL_BITS | ids[0] & SERIALS
        used, words[chosen + 1] = words[chosen + 1], int(now * 1000)
        if before != session:
            words[chosen] = session
            self._uncount(before)
            self._counts[ids[1]] += 1
        return (before, used) if before >> SERIAL_BITS == mark else (0, 0)

    def place(self, digest: bytes, worker: Worker | None, now: float) -> None:
        if not self._buckets:
            return  # no policy of this proxy keeps sessions
        if worker is None:
            self._remove(digest)
        elif (ids := self._workers.ids(worker)) is not None:
            self._put(digest, ids, now)

    def rows(self, limit: int) -> SharedRows:
        """The `limit` sessions that were used last. Reads the whole table: may run in a thread."""
        end = self._buckets * WAYS * SESSION_BYTES
        rows: list[tuple[int, int, str]] = []
        for offset in self._written(end):
            words = array("Q", os.pread(self._descriptor, min(SLICE_BYTES, end - offset), offset))
            for place in range(0, len(words), 2):
                word = words[place]
                worker = self._workers.find(word & SERIALS) if word else None
                if worker is not None:
                    bucket = (offset // SESSION_BYTES + place // 2) // WAYS
                    digest = bucket << 40 | word >> SERIAL_BITS
                    rows.append((words[place + 1], digest, worker.url))
        return SharedRows(self._buckets, tuple(nlargest(limit, rows)))

    def _written(self, end: int) -> Iterator[int]:
        """Offsets of the slices of the table that have data."""
        offset = 0
        while True:
            try:
                offset = os.lseek(self._descriptor, offset, os.SEEK_DATA)
            except OSError:
                return  # nothing was written after it
            if offset >= end:
                return
            yield offset
            offset += SLICE_BYTES

    def restore(self, rows: SharedRows, find: Callable[[str], Worker | None]) -> int:
        """Add the sessions of another program; returns their number. A table of another size gets
        none, because a session's bucket depends on the size. Existing sessions are kept."""
        count = 0
        for used_ms, digest, url in rows.sessions if rows.buckets == self._buckets else ():
            worker = find(url)
            ids = self._workers.ids(worker) if worker is not None else None
            if ids is None:
                continue
            known = digest.to_bytes(13, "big")
            places, mark = self._places_of(known)
            if all(self._words[place] >> SERIAL_BITS != mark for place in places):
                self._put(known, ids, used_ms / 1000)
                count += 1
        return count

    def finish(self, key: str) -> bool:
        digest = session_digest(key)
        known = self._remove(digest)
        if known and self._notes is not None and self._notes.enabled:
            self._notes.note(digest, FINISHED)
        return known

    def _remove(self, digest: bytes) -> bool:
        words, (places, mark) = self._words, self._places_of(digest)
        for place in places:
            word = words[place]
            if word >> SERIAL_BITS == mark:
                words[place] = 0
                self._uncount(word)
                return True
        return False

    def count(self, worker: Worker) -> int:
        ids = self._workers.ids(worker)
        return max(0, self._counts[ids[1]]) if ids is not None else 0

    def maintain(self, now: float) -> None:
        """In the main process: read a slice of the table, and correct the counts after the last.

        Other processes do nothing: an expired session is ignored, and is replaced first.
        """
        if not self._recounts:
            return
        recount = self._recount
        if not recount.at:
            every = filter(None, map(self._workers.ids, self._workers.members()))
            recount.before = {ids: self._counts[ids[1]] for ids in every}
        end = self._buckets * WAYS * SESSION_BYTES
        try:  # skip parts that were never written
            recount.at = os.lseek(self._descriptor, recount.at, os.SEEK_DATA)
        except OSError:
            recount.at = end
        size = min(self._slice_bytes, end - recount.at)
        if size > 0:
            recount.add(os.pread(self._descriptor, size, recount.at), self._idle_before(now))
            recount.at += size
        if recount.at >= end:
            self._correct(recount)
            self._recount = _Recount()

    def __len__(self) -> int:
        return sum(self.count(worker) for worker in self._workers.members())

    def _correct(self, recount: _Recount) -> None:
        """Correct counts by their distance from the range of values that they had during the pass:
        a difference within that range may come from concurrent changes."""
        for (serial, cell), before in recount.before.items():
            low, high = sorted((before, self._counts[cell]))
            exact = recount.found[serial & SERIALS]
            self._counts[cell] += min(0, exact - low) + max(0, exact - high)

    def _uncount(self, word: int) -> None:
        worker = self._workers.find(word & SERIALS) if word else None
        ids = self._workers.ids(worker) if worker is not None else None
        if ids is not None:
            self._counts[ids[1]] -= 1

    def _places_of(self, digest: bytes) -> tuple[range, int]:
        """The words of the digest's bucket, and the key's mark in it, which is never 0."""
        bucket = int.from_bytes(digest[:8], "big") % self._buckets
        first = bucket * WAYS * 2
        mark = int.from_bytes(digest[8:13], "big") or 1
        return range(first, first + WAYS * 2, 2), mark

    def _idle(self, used: int, now: float) -> bool:
        return used < self._idle_before(now)

    def _idle_before(self, now: float) -> float:
        """Sessions whose last use is before this time, in milliseconds, have expired."""
        return now * 1000 - self._idle_ms if self._idle_ms else 0


class _Recount:
    """A pass over the table. `before`: the counts at its beginning, by serial number and cell."""

    def __init__(self) -> None:
        self.at = 0
        self.before: dict[tuple[int, int], int] = {}
        self.found: Counter[int] = Counter()  # sessions by serial number

    def add(self, piece: bytes, idle_before: float) -> None:
        words = array("Q", piece)
        self.found.update(
            word & SERIALS
            for word, used in zip(words[::2], words[1::2], strict=True)
            if word and used >= idle_before
        )
