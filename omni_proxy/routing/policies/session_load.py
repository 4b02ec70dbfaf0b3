"""The table of sessions: the worker of each session, and the number of sessions of each worker.

Invariant: at most `sticky_max` sessions are kept, the least recently used is dropped first; a
session that was idle for `sticky_idle_secs` has expired (0: never). `count(worker)` is the number
of sessions in the table at this worker; expired ones may count until the next `maintain`. Several
data-plane processes share a table: `multiprocess.shared_dataplane`. With `share`, a session that
begins, moves or ends is noted for the other proxies of a cluster, and again while it is used;
`place` applies such a note of another proxy. Sessions placed by other proxies count here, too; one
that another proxy moved counts at both workers until its next request here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Final, Protocol, TypeAlias

from omni_proxy.cluster.messages import target_key
from omni_proxy.cluster.session_places import FINISHED, SessionNotes, session_digest
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.policies.least_request import load_of

DROPPED_PER_SLICE = 1000
NOTED_AGAIN: Final = 4  # notes per `sticky_idle_secs` of a session in constant use
NOTED_AGAIN_SECS: Final = 900.0  # interval of these notes if sessions do not expire
SessionRow: TypeAlias = tuple[str, str, float]  # its key, the URL of its worker or rank, last use


class Sessions(Protocol):
    """A table of sessions. `now` is monotonic seconds."""

    def tune(self, max_sessions: int, idle_secs: float) -> None:
        """Set `sticky_max` and `sticky_idle_secs`."""

    def find(self, key: str, now: float) -> Worker | None: ...
    def keep(self, key: str, worker: Worker, now: float) -> None: ...

    def finish(self, key: str) -> bool:
        """Remove the session; returns whether it existed."""
        ...

    def count(self, worker: Worker) -> int: ...
    def maintain(self, now: float) -> None: ...
    def __len__(self) -> int: ...

    def share(self, notes: SessionNotes, prefix: str) -> None:
        """Add later changes to `notes`. `prefix`: prepended to keys, the same in all proxies."""

    def place(self, digest: bytes, worker: Worker | None, now: float) -> None:
        """Another proxy placed the session with this digest there; None: it is finished."""


def repeat_secs(idle_secs: float) -> float:
    """Interval in which a session in use is noted again, so that no proxy lets it expire."""
    return idle_secs / NOTED_AGAIN if idle_secs else NOTED_AGAIN_SECS


class OwnSessions:
    """Sessions in this process's memory."""

    __slots__ = (
        "_counts", "_idle_secs", "_max", "_notes", "_prefix", "_received", "_repeat_secs",
        "_sessions",
    )  # fmt: skip

    def __init__(self) -> None:
        # By digest: sessions that another proxy placed since their last use here.
        self._received: OrderedDict[bytes, tuple[Worker | None, float]] = OrderedDict()
        self._notes: SessionNotes | None = None
        self._prefix = ""
        self._repeat_secs = NOTED_AGAIN_SECS
        self._sessions: OrderedDict[str, tuple[Worker, float]] = OrderedDict()
        self._counts: dict[Worker, int] = {}
        self._max = 1
        self._idle_secs = 0.0

    def tune(self, max_sessions: int, idle_secs: float) -> None:
        self._max, self._idle_secs = max_sessions, idle_secs
        self._repeat_secs = repeat_secs(idle_secs)

    def share(self, notes: SessionNotes, prefix: str) -> None:
        self._notes, self._prefix = notes, prefix

    def place(self, digest: bytes, worker: Worker | None, now: float) -> None:
        self._drop_received(digest)
        self._received[digest] = (worker, now)
        if worker is not None:
            self._counts[worker] = self._counts.get(worker, 0) + 1
        if len(self._received) > self._max:
            self._drop_received(next(iter(self._received)))

    def find(self, key: str, now: float) -> Worker | None:
        if self._received:
            self._take_received(key)
        session = self._sessions.get(key)
        if session is None or self._idle(session[1], now):
            return None
        return session[0]

    def keep(self, key: str, worker: Worker, now: float) -> None:
        before = self._sessions.get(key)
        if self._notes is not None and self._notes.enabled:
            secs = self._repeat_secs
            if before is None or before[0] is not worker or now // secs != before[1] // secs:
                self._notes.note(session_digest(self._prefix + key), target_key(worker.url))
        self._set(key, worker, now)

    def _set(self, key: str, worker: Worker, now: float) -> None:
        before = self._sessions.get(key)
        if before is None or before[0] is not worker:
            if before is not None:
                self._uncount(before[0])
            self._counts[worker] = self._counts.get(worker, 0) + 1
        self._sessions[key] = (worker, now)
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._max and len(self._sessions) > 1:
            self._drop_oldest()

    def finish(self, key: str) -> bool:
        self._take_received(key)
        session = self._sessions.pop(key, None)
        if session is None:
            return False
        self._uncount(session[0])
        if self._notes is not None and self._notes.enabled:
            self._notes.note(session_digest(self._prefix + key), FINISHED)
        return True

    def count(self, worker: Worker) -> int:
        return self._counts.get(worker, 0)

    def maintain(self, now: float) -> None:
        for _ in range(DROPPED_PER_SLICE):
            oldest = next(iter(self._sessions.values()), None)
            full = len(self._sessions) > self._max
            if oldest is None or (not full and not self._idle(oldest[1], now)):
                break
            self._drop_oldest()
        for _ in range(DROPPED_PER_SLICE):
            digest = next(iter(self._received), None)
            if digest is None or not self._idle(self._received[digest][1], now):
                break
            self._drop_received(digest)

    def rows(self, limit: int) -> list[SessionRow]:
        """The `limit` most recently used sessions, oldest first."""
        first = max(0, len(self._sessions) - limit)
        return [
            (key, worker.url, used)
            for key, (worker, used) in islice(self._sessions.items(), first, None)
        ]

    def __len__(self) -> int:
        return len(self._sessions)

    def _take_received(self, key: str) -> None:
        """Apply the latest placement by another proxy to this session."""
        digest = session_digest(self._prefix + key)
        received = self._received.get(digest)
        if received is None:
            return
        worker, placed_at = received
        self._drop_received(digest)
        if worker is not None:
            self._set(key, worker, placed_at)
        elif (session := self._sessions.pop(key, None)) is not None:
            self._uncount(session[0])

    def _drop_received(self, digest: bytes) -> None:
        worker, _ = self._received.pop(digest, (None, 0.0))
        if worker is not None:
            self._uncount(worker)

    def _drop_oldest(self) -> None:
        _, (worker, _) = self._sessions.popitem(last=False)
        self._uncount(worker)

    def _uncount(self, worker: Worker) -> None:
        remaining = self._counts[worker] - 1
        if remaining:
            self._counts[worker] = remaining
        else:
            del self._counts[worker]  # so that a worker that left is not kept in memory

    def _idle(self, used: float, now: float) -> bool:
        return self._idle_secs > 0 and now - used > self._idle_secs


def fewest_sessions(candidates: Sequence[Worker], sessions: Sessions, turn: int) -> Worker:
    """The worker with the fewest sessions per weight; among ties the one with the least load per
    weight, and among those the next in turn."""
    fills = [
        ((sessions.count(worker) + 1) / worker.weight, load_of(worker) / worker.weight)
        for worker in candidates
    ]
    lowest = min(fills)
    ties = [worker for worker, fill in zip(candidates, fills, strict=True) if fill == lowest]
    return ties[turn % len(ties)]


class PrefixedSessions:
    """Part of a table that is shared with other policies: its keys begin with `prefix`."""

    __slots__ = ("_prefix", "_sessions")

    def __init__(self, sessions: Sessions, prefix: str) -> None:
        self._sessions = sessions
        self._prefix = prefix

    def tune(self, max_sessions: int, idle_secs: float) -> None:
        self._sessions.tune(max_sessions, idle_secs)

    def find(self, key: str, now: float) -> Worker | None:
        return self._sessions.find(self._prefix + key, now)

    def keep(self, key: str, worker: Worker, now: float) -> None:
        self._sessions.keep(self._prefix + key, worker, now)

    def finish(self, key: str) -> bool:
        return self._sessions.finish(self._prefix + key)

    def count(self, worker: Worker) -> int:
        return self._sessions.count(worker)

    def maintain(self, now: float) -> None:
        self._sessions.maintain(now)

    def __len__(self) -> int:
        """Number of sessions in the whole table."""
        return len(self._sessions)

    def share(self, notes: SessionNotes, prefix: str) -> None:
        """Does nothing: the underlying table is shared as a whole."""

    def place(self, digest: bytes, worker: Worker | None, now: float) -> None:
        self._sessions.place(digest, worker, now)
