"""At which worker each session is, over all proxies: who placed it last is right.

A session goes by a hash of its key, which may be a secret. Invariants: two proxies that have heard
the same have the same worker for a session, in whatever order they heard it: of two placements the
one with the higher stamp holds, of equal stamps that at the higher target; one that was made with
another one known has a higher stamp. Bounded: the session that was placed least recently goes
first. Pure; stamps are milliseconds of the store's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 16
STAMP_BYTES: Final = 8
ROW_BYTES: Final = DIGEST_BYTES + STAMP_BYTES
MOST_PENDING: Final = 1 << 13
MOST_PLACED: Final = 1 << 16  # some 20 MB
REPEATED: Final = 4096  # sessions, for a proxy that joins
FINISHED: Final = 0  # the target of a session that is over


def session_digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


class SessionNotes:
    """Sessions that were placed, and wait to be published. `enabled`: whether they are at all."""

    def __init__(self) -> None:
        self.enabled = False
        self.dropped = 0  # for which there was no room
        self._pending: OrderedDict[bytes, int] = OrderedDict()

    def note(self, digest: bytes, target: int) -> None:
        """It is at this target from now on, or FINISHED."""
        self._pending[digest] = target
        if len(self._pending) > MOST_PENDING:
            self._pending.popitem(last=False)
            self.dropped += 1

    def take(self, most: int) -> dict[bytes, int]:
        count = min(most, len(self._pending))
        return dict(self._pending.popitem(last=False) for _ in range(count))

    @property
    def pending(self) -> int:
        return len(self._pending)


class SessionPlace(NamedTuple):
    stamp: int
    target: int


class PlacedSessions:
    """`most`: how many are remembered; what is heard of any other is believed."""

    def __init__(self, most: int = MOST_PLACED) -> None:
        self._most = most
        self._known: OrderedDict[bytes, SessionPlace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def place(self, sessions: Mapping[bytes, int], stamp: int) -> dict[int, bytes]:
        """This proxy has placed them now: what to publish, rows by target."""
        return _packed(
            (digest, self._set(digest, self._stamped(digest, target, stamp)))
            for digest, target in sessions.items()
        )

    def receive(self, rows: Mapping[int, bytes]) -> dict[bytes, int]:
        """Where sessions are that no later placement is known of."""
        found = {}
        for target, packed in rows.items():
            for digest, stamp in _unpacked(packed):
                known, heard = self._known.get(digest), SessionPlace(stamp, target)
                if known is None or heard >= known:
                    self._set(digest, heard)
                    found[digest] = target
        return found

    def newest(self) -> dict[int, bytes]:
        """Rows for a proxy that knows nothing yet."""
        rows = list(self._known.items())[-REPEATED:]
        return _packed(row for row in rows if row[1].target != FINISHED)

    def _stamped(self, digest: bytes, target: int, stamp: int) -> SessionPlace:
        known = self._known.get(digest)
        if known is None:
            return SessionPlace(stamp, target)
        if known.target == target:  # it is used still: nothing is decided anew
            return known
        return SessionPlace(max(stamp, known.stamp + 1), target)

    def _set(self, digest: bytes, placement: SessionPlace) -> SessionPlace:
        self._known[digest] = placement
        self._known.move_to_end(digest)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return placement


def _packed(rows: Iterable[tuple[bytes, SessionPlace]]) -> dict[int, bytes]:
    packed: dict[int, bytearray] = {}
    for digest, (stamp, target) in rows:
        packed.setdefault(target, bytearray()).extend(digest + stamp.to_bytes(STAMP_BYTES, "big"))
    return {target: bytes(each) for target, each in packed.items()}


def _unpacked(packed: bytes) -> Iterator[tuple[bytes, int]]:
    """What is no whole row is ignored."""
    for at in range(0, len(packed) - ROW_BYTES + 1, ROW_BYTES):
        middle = at + DIGEST_BYTES
        yield packed[at:middle], int.from_bytes(packed[middle : middle + STAMP_BYTES], "big")
