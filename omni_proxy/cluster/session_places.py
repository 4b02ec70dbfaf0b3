"""The worker of each session, agreed on by all proxies: the last placement wins. Pure.

A session is identified by a hash of its key, which may be a secret. Invariants: proxies that have
received the same placements have the same worker for a session, in whatever order they received
them: the placement with the higher stamp wins, for equal stamps that with the higher target key. A
placement that replaces a known one has a higher stamp. The table is bounded, and evicts the session
that was placed least recently. Stamps are milliseconds of the store's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 16
STAMP_BYTES: Final = 8
ROW_BYTES: Final = DIGEST_BYTES + STAMP_BYTES
MAX_PENDING: Final = 1 << 13
MAX_PLACED: Final = 1 << 16  # some 20 MB
REPEATED: Final = 4096  # sessions that are published again for a proxy that joins
FINISHED: Final = 0  # the target key of a session that has ended


def session_digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


class SessionNotes:
    """Placed sessions that wait to be published. `enabled`: whether sessions are shared."""

    def __init__(self) -> None:
        self.enabled = False
        self.dropped = 0  # sessions dropped because too many were pending
        self._pending: OrderedDict[bytes, int] = OrderedDict()

    def note(self, digest: bytes, target_key: int) -> None:
        """Note that a session is at this target from now on, or FINISHED."""
        self._pending[digest] = target_key
        if len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)
            self.dropped += 1

    def take(self, limit: int) -> dict[bytes, int]:
        count = min(limit, len(self._pending))
        return dict(self._pending.popitem(last=False) for _ in range(count))

    @property
    def pending(self) -> int:
        return len(self._pending)


class SessionPlace(NamedTuple):
    stamp: int
    target_key: int


class PlacedSessions:
    """Known placements, at most `max_entries`; placements of unknown sessions are accepted."""

    def __init__(self, max_entries: int = MAX_PLACED) -> None:
        self._max_entries = max_entries
        self._known: OrderedDict[bytes, SessionPlace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def place(self, sessions: Mapping[bytes, int], stamp: int) -> dict[int, bytes]:
        """Record sessions that this proxy placed; return the rows to publish, by target key."""
        return _packed(
            (digest, self._set(digest, self._stamped(digest, target_key, stamp)))
            for digest, target_key in sessions.items()
        )

    def receive(self, rows: Mapping[int, bytes]) -> dict[bytes, int]:
        """Record placements of other proxies; return those that win, as target key by session."""
        winners = {}
        for target_key, packed in rows.items():
            for digest, stamp in _unpacked(packed):
                before, place = self._known.get(digest), SessionPlace(stamp, target_key)
                if before is None or place >= before:
                    self._set(digest, place)
                    winners[digest] = target_key
        return winners

    def newest(self) -> dict[int, bytes]:
        """The newest rows, for a proxy that joined."""
        rows = list(self._known.items())[-REPEATED:]
        return _packed(row for row in rows if row[1].target_key != FINISHED)

    def _stamped(self, digest: bytes, target_key: int, stamp: int) -> SessionPlace:
        known = self._known.get(digest)
        if known is None:
            return SessionPlace(stamp, target_key)
        if known.target_key == target_key:  # unchanged: keep its stamp
            return known
        return SessionPlace(max(stamp, known.stamp + 1), target_key)

    def _set(self, digest: bytes, placement: SessionPlace) -> SessionPlace:
        self._known[digest] = placement
        self._known.move_to_end(digest)
        if len(self._known) > self._max_entries:
            self._known.popitem(last=False)
        return placement


def _packed(rows: Iterable[tuple[bytes, SessionPlace]]) -> dict[int, bytes]:
    packed: dict[int, bytearray] = {}
    for digest, (stamp, target_key) in rows:
        packed.setdefault(target_key, bytearray()).extend(
            digest + stamp.to_bytes(STAMP_BYTES, "big")
        )
    return {target_key: bytes(rows_of_target) for target_key, rows_of_target in packed.items()}


def _unpacked(packed: bytes) -> Iterator[tuple[bytes, int]]:
    """An incomplete row at the end is ignored."""
    for offset in range(0, len(packed) - ROW_BYTES + 1, ROW_BYTES):
        middle = offset + DIGEST_BYTES
        yield packed[offset:middle], int.from_bytes(packed[middle : middle + STAMP_BYTES], "big")
