"""Hashes of the beginnings of prompts: what a proxy publishes of where it has sent them, and hears.

    text         | 64 | 128 | 256 | 512 | 1,024 | 1,280 ... 65,536 bytes
    beginnings   |  8 bytes of a running hash at each of these lengths

Invariants: equal beginnings have equal hashes in every proxy, and no text can be read from them;
each beginning is published once for a worker, and again after `REPEAT_SECS` where it is still used;
both tables are bounded, and forget what was used, or heard, least recently. Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from sys import byteorder
from typing import Final

HASH_BYTES: Final = 8
LONGEST: Final = 64 * 1024  # bytes of text
REPEAT_SECS: Final = 60.0
MOST_PUBLISHED: Final = 1 << 15  # that are remembered as published: some 8 MB
MOST_PENDING: Final = 1 << 13  # that wait to be published: some 2 MB
MOST_HEARD: Final = 1 << 17  # some 25 MB
MOST_HOLDERS: Final = 8  # of one beginning
REPEATED: Final = 4096  # beginnings, for a proxy that joins


def _ends() -> list[int]:
    ends = [64, 128, 256, 512, 1024]
    while ends[-1] < LONGEST:
        before = 1 << (ends[-1].bit_length() - 1)
        ends.append(ends[-1] + min(4096, before // 4))
    return ends


_ENDS: Final = _ends()
_PIECES: Final = [slice(*ends) for ends in pairwise([0, *_ENDS])]


def count_beginnings(length: int) -> int:
    """How many a text of so many bytes has."""
    return bisect_right(_ENDS, length)


def length_of(count: int) -> int:
    """How many bytes of a text its first `count` beginnings are."""
    return _ENDS[count - 1] if count else 0


def beginnings(text: bytes) -> list[int]:
    """Hashes, the shortest beginning first. Half a microsecond for each, and 1 for each KB."""
    running, hashes = blake2b(digest_size=HASH_BYTES), []
    for piece in _PIECES[: count_beginnings(len(text))]:
        running.update(text[piece])
        hashes.append(int.from_bytes(running.copy().digest(), "big"))
    return hashes


def pack_hashes(hashes: Iterable[int]) -> bytes:
    packed = array("Q", hashes)
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(packed: bytes) -> Iterable[int]:
    """What does not fit into a hash at the end is ignored."""
    hashes = array("Q", packed[: len(packed) - len(packed) % HASH_BYTES])
    if byteorder == "little":
        hashes.byteswap()
    return hashes


class PrefixNotes:
    """What this proxy has to publish. A target is a worker or rank, as in `messages.target_key`."""

    def __init__(self) -> None:
        self.dropped = 0  # for which there was no room
        self._published: OrderedDict[tuple[int, int], float] = OrderedDict()  # hash, target: when
        self._pending: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._forgotten: dict[int, float] = {}  # target: when its cache was lost

    def note(self, hashes: Sequence[int], target: int, now: float) -> None:
        """The target gets a prompt with these beginnings."""
        since = max(now - REPEAT_SECS, self._forgotten.get(target, now - REPEAT_SECS))
        for each in reversed(hashes):
            if self._published.get((each, target), since) > since:
                break  # and so were those before it
            self._add((each, target), now)

    def add(self, packed: dict[int, bytes], now: float) -> None:
        """What another process of this proxy has noted."""
        for target, hashes in packed.items():
            for each in unpack_hashes(hashes):
                self._add((each, target), now)

    def forget(self, target: int, now: float) -> None:
        """Its cache is empty: what it gets from now on is new."""
        if len(self._forgotten) > MOST_HOLDERS * MOST_PENDING:
            self._forgotten.clear()
        self._forgotten[target] = now
        for pair in [pair for pair in self._pending if pair[1] == target]:
            del self._pending[pair]

    def take(self, most: int) -> dict[int, bytes]:
        """The next of them to publish, packed, by target."""
        found: dict[int, list[int]] = {}
        for _ in range(min(most, len(self._pending))):
            (each, target), _ = self._pending.popitem(last=False)
            found.setdefault(target, []).append(each)
        return {target: pack_hashes(hashes) for target, hashes in found.items()}

    def repeat(self) -> None:
        """Another proxy knows nothing yet: the newest are published again."""
        for pair in list(self._published)[-REPEATED:]:
            if self._published[pair] > self._forgotten.get(pair[1], float("-inf")):
                self._pending[pair] = None
        self._trim()

    def _add(self, pair: tuple[int, int], now: float) -> None:
        self._published[pair] = now
        self._published.move_to_end(pair)
        self._pending[pair] = None
        self._trim()

    def _trim(self) -> None:
        while len(self._published) > MOST_PUBLISHED:
            self._published.popitem(last=False)
        while len(self._pending) > MOST_PENDING:
            pair, _ = self._pending.popitem(last=False)
            self._published.pop(pair, None)
            self.dropped += 1

    @property
    def pending(self) -> int:
        return len(self._pending)


class PrefixHints:
    """What other proxies have published: which targets were sent a beginning."""

    def __init__(self, most: int = MOST_HEARD) -> None:
        self._most = most
        # By hash: numbers of its holders, the newest last. Another number for each life of a cache.
        self._holders: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._numbers: dict[int, int] = {}
        self._targets: dict[int, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, packed: dict[int, bytes]) -> None:
        holders = self._holders
        for target, hashes in packed.items():
            number = self._numbers.get(target) or self._admit(target)
            for each in unpack_hashes(hashes):
                before = holders.get(each, ())
                if number in before:
                    before = tuple(known for known in before if known != number)
                holders[each] = (*before[1 - MOST_HOLDERS :], number)
                holders.move_to_end(each)
                if len(holders) > self._most:
                    holders.popitem(last=False)

    def forget(self, target: int) -> None:
        """Its cache is empty."""
        number = self._numbers.pop(target, None)
        if number is not None:
            del self._targets[number]

    def clear(self) -> None:
        self._holders.clear()
        self._numbers.clear()
        self._targets.clear()

    def depths(self, hashes: Sequence[int]) -> dict[int, int]:
        """How many of a prompt's beginnings each target was sent, those with none left out; the
        deepest first."""
        found: dict[int, int] = {}
        holders, targets = self._holders, self._targets
        for count in range(len(hashes), 0, -1):
            for number in reversed(holders.get(hashes[count - 1], ())):
                target = targets.get(number)
                if target is not None and target not in found:
                    found[target] = count
        return found

    def _admit(self, target: int) -> int:
        self._last += 1
        self._numbers[target] = self._last
        self._targets[self._last] = target
        return self._last
