"""Hashes of prompt prefixes ("beginnings") that proxies publish with the worker they sent them to.

    text         | 256 | 384 | 512 | 768 | 1,024 | 1,536 ... 65,536 bytes
    beginnings   |  8 bytes of chained hashes at each of these lengths

Invariants: equal beginnings have equal hashes in every proxy, and the text can't be recovered from
them; each beginning is published once for a worker, and again after `REPEAT_SECS` if it is still
used; both tables are bounded, and evict the entries that were published or received first. Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from sys import byteorder
from typing import Final

from xxhash import xxh3_64_intdigest

HASH_BYTES: Final = 8
MAX_TEXT_BYTES: Final = 64 * 1024  # bytes of text
REPEAT_SECS: Final = 60.0
MAX_PUBLISHED: Final = 1 << 15  # entries of the table of published hashes: some 4 MB
MAX_PENDING: Final = 1 << 13  # hashes that wait to be published: some 1 MB
MAX_RECEIVED: Final = 1 << 17  # hashes received from other proxies: some 25 MB
MAX_HOLDERS: Final = 8  # targets of one beginning
REPEATED: Final = 4096  # beginnings that are published again for a proxy that joins
FORGOTTEN: Final = 64  # entries evicted together if a table is full


def _ends() -> list[int]:
    """The lengths: each is at most 1.5 times the previous one, and at most 4 KB longer."""
    ends = [256]
    while ends[-1] < MAX_TEXT_BYTES:
        power = 1 << (ends[-1].bit_length() - 1)
        ends.append(ends[-1] + min(4096, power // 2))
    return ends


_ENDS: Final = _ends()
_PIECES: Final = [slice(*ends) for ends in pairwise([0, *_ENDS])]


def count_beginnings(length: int) -> int:
    """The number of beginnings of a text of `length` bytes."""
    return bisect_right(_ENDS, length)


def length_of(count: int) -> int:
    """The length in bytes of the beginning number `count`; 0 for 0."""
    return _ENDS[count - 1] if count else 0


def beginnings(text: bytes) -> list[int]:
    """Hashes of the text's beginnings, the shortest one first."""
    last, hashes = 0, []
    for piece in _PIECES[: bisect_right(_ENDS, len(text))]:
        last = xxh3_64_intdigest(text[piece], last)
        hashes.append(last)
    return hashes


def pack_hashes(hashes: Iterable[int]) -> bytes:
    packed = array("Q", hashes)
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(packed: bytes) -> Iterable[int]:
    """Incomplete hashes at the end are ignored."""
    hashes = array("Q", packed[: len(packed) - len(packed) % HASH_BYTES])
    if byteorder == "little":
        hashes.byteswap()
    return hashes


class PrefixNotes:
    """Hashes that this proxy has to publish. Targets are keys of `messages.target_key`."""

    def __init__(self) -> None:
        self.dropped = 0  # hashes dropped because too many were pending
        self.pending = 0
        # By target: hashes with the time of their note, the newest last.
        self._published: dict[int, dict[int, float]] = {}
        self._count = 0
        self._pending: dict[int, list[int]] = {}

    def note(self, hashes: Sequence[int], target_key: int, now: float) -> None:
        """Note that the target gets a prompt with these beginnings."""
        published = self._published.get(target_key)
        if published is None:
            published = self._published[target_key] = {}
        due, new = now - REPEAT_SECS, []
        for prefix_hash in reversed(hashes):
            published_at = published.get(prefix_hash)
            if published_at is not None:
                if published_at > due:
                    break  # shorter beginnings were published at least as recently
                del published[prefix_hash]
                self._count -= 1
            published[prefix_hash] = now
            new.append(prefix_hash)
        if new:
            self._add(target_key, new)

    def add(self, packed: dict[int, bytes], now: float) -> None:
        """Add hashes that another process of this proxy has noted."""
        for target_key, hashes in packed.items():
            published = self._published.setdefault(target_key, {})
            new = list(unpack_hashes(hashes))
            before = len(published)
            published.update(dict.fromkeys(new, now))
            self._count -= len(new) - (len(published) - before)
            self._add(target_key, new)

    def forget(self, target_key: int) -> None:
        """The target's cache is empty: its later prompts are published again."""
        self._count -= len(self._published.pop(target_key, ()))
        self.pending -= len(self._pending.pop(target_key, ()))

    def take(self, limit: int) -> dict[int, bytes]:
        """Remove and return up to `limit` pending hashes, packed, by target."""
        taken: dict[int, bytes] = {}
        while limit > 0 and self._pending:
            target_key = next(iter(self._pending))
            hashes = self._pending.pop(target_key)
            if len(hashes) > limit:
                self._pending[target_key] = hashes[limit:]
                del hashes[limit:]
            taken[target_key] = pack_hashes(hashes)
            self.pending -= len(hashes)
            limit -= len(hashes)
        return taken

    def repeat(self) -> None:
        """Publish the newest hashes of each target again, for a proxy that joined."""
        share = REPEATED // max(1, len(self._published))
        for target_key, published in self._published.items():
            again = list(islice(reversed(published), share))
            self._pending.setdefault(target_key, []).extend(again)
            self.pending += len(again)

    def _add(self, target_key: int, new: list[int]) -> None:
        """Add hashes, which are in the published table already, to the pending ones."""
        self._count += len(new)
        self.pending += len(new)
        self._pending.setdefault(target_key, []).extend(new)
        if self._count > MAX_PUBLISHED:
            largest = max(self._published, key=lambda key: len(self._published[key]))
            oldest = self._published[largest]
            for prefix_hash in list(islice(oldest, FORGOTTEN)):
                del oldest[prefix_hash]
                self._count -= 1
        if self.pending > MAX_PENDING:
            self._drop(self.pending - MAX_PENDING)

    def _drop(self, count: int) -> None:
        """Drop pending hashes; they are noted again when they are used again."""
        for target_key in list(self._pending):
            dropped = self._pending[target_key][:count]
            del self._pending[target_key][: len(dropped)]
            if not self._pending[target_key]:
                del self._pending[target_key]
            published = self._published.get(target_key, {})
            for prefix_hash in dropped:
                self._count -= published.pop(prefix_hash, None) is not None
            self.pending -= len(dropped)
            self.dropped += len(dropped)
            count -= len(dropped)
            if count <= 0:
                return


class PrefixHints:
    """Hints of other proxies: the targets that each beginning was sent to."""

    def __init__(self, max_entries: int = MAX_RECEIVED) -> None:
        self._max_entries = max_entries
        # By hash: numbers of its targets, the newest last. A target gets a new number when its
        # cache is cleared.
        self._holders: dict[int, tuple[int, ...]] = {}
        self._numbers: dict[int, int] = {}
        self._targets: dict[int, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, packed: dict[int, bytes]) -> None:
        holders = self._holders
        for target_key, hashes in packed.items():
            number = self._numbers.get(target_key) or self._admit(target_key)
            for prefix_hash in unpack_hashes(hashes):
                before = holders.pop(prefix_hash, ())
                if number in before:
                    before = tuple(known for known in before if known != number)
                holders[prefix_hash] = (*before[1 - MAX_HOLDERS :], number)
                if len(holders) > self._max_entries:
                    for oldest in list(
                        islice(holders, min(FORGOTTEN, self._max_entries // 4 or 1))
                    ):
                        del holders[oldest]

    def forget(self, target_key: int) -> None:
        """Drop all hints of a target, whose cache is empty."""
        number = self._numbers.pop(target_key, None)
        if number is not None:
            del self._targets[number]

    def clear(self) -> None:
        self._holders.clear()
        self._numbers.clear()
        self._targets.clear()

    def depths(self, hashes: Sequence[int]) -> dict[int, int]:
        """By target, how many of the prompt's beginnings it was sent, the largest number first.

        Targets with none are left out.
        """
        depths: dict[int, int] = {}
        holders, targets = self._holders, self._targets
        count = len(hashes)
        for prefix_hash in reversed(hashes):
            if prefix_hash in holders:
                for number in reversed(holders[prefix_hash]):
                    target_key = targets.get(number)
                    if target_key is not None and target_key not in depths:
                        depths[target_key] = count
            count -= 1
        return depths

    def _admit(self, target_key: int) -> int:
        self._last += 1
        self._numbers[target_key] = self._last
        self._targets[self._last] = target_key
        return self._last
