"""The keys of callers in all processes, their usage in shared memory, and the report of wrong keys.

`SharedKeys` applies new keys: in the main process immediately, in the others by their next
snapshot. `KeyCounters` is the memory, one row for each process, created when it is first needed:
for a key, or for a data-plane process; `KeySlots` assigns slots of a row to the configured names.
Invariant: every cell has one writer, the process of its row, so no update is lost without locks.
After a process has exited its in-flight counts are cleared, the others are kept. Requests with a
missing or wrong key cause at most one log line per `PAUSE_SECS`; each is counted in exactly one.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Final

import trio

from omni_proxy.api_keys.caller_limits import IN_FLIGHT, REFUSED_REQUESTS, SLOT_CELLS, slot_totals
from omni_proxy.api_keys.caller_lookup import UNKNOWN_SLOT
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import MAX_KEYS, CallerKey
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.multiprocess.ipc.messages import CallersMessage
from omni_proxy.multiprocess.shared_memory.worker_counters import fence
from omni_proxy.runtime_config.key_sources import KeySources

_log = logging.getLogger(__name__)

KEY_CELL_BYTES: Final = 8
KEY_SLOTS: Final = 2 * MAX_KEYS  # so that a released slot is not reused immediately
KEY_ROW_CELLS: Final = KEY_SLOTS * SLOT_CELLS
KEY_ROW_BYTES: Final = -(-KEY_ROW_CELLS * KEY_CELL_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE

MAX_TRIES: Final = 8
REPORT_SECS: Final = 1.0  # between two checks for requests without a valid key
PAUSE_SECS: Final = 60.0  # between two log lines about them
RECENT_SECS: Final = 60.0
_ZERO: Final = bytes(KEY_CELL_BYTES)

Row = memoryview  # of signed 64-bit integers


class SharedKeys:
    """`publish`: sends the keys to the data-plane processes."""

    def __init__(
        self,
        dataplane: DataPlane,
        sources: KeySources[CallerKey],
        publish: Callable[[CallersMessage], None],
    ) -> None:
        self._dataplane = dataplane
        self._sources = sources
        self._publish = publish
        self._counters: KeyCounters | None = None
        self._slots = KeySlots()
        sources.watch(self.apply)

    @property
    def counters(self) -> KeyCounters:
        """The shared memory, which the first access creates. Raises OSError."""
        if self._counters is None:
            self._counters = KeyCounters.create()
        return self._counters

    def prepare(self, new: Config) -> None:
        """Create what the keys of `new` need. Raises OSError."""
        if new.keys or new.server.api_key:
            _ = self.counters

    def apply(self) -> None:
        """Apply the newest keys: in this process immediately, in the others by a snapshot."""
        table = self._sources.table
        if self._counters is None and not self._dataplane.settings.callers.guarded:
            return
        counters = self.counters
        slots = self._slots.assign([entry.name for entry in table.entries], counters)
        self._dataplane.follow_keys(table, slots, counters)
        self._publish(
            CallersMessage(
                table.entries, tuple(slots[entry.name] for entry in table.entries), counters.highest
            )
        )

    def extend(self, index: int) -> None:
        """Add the row of a new process. Raises OSError."""
        self.counters.extend(index)
        self.apply()

    def drop_in_flight(self, index: int) -> None:
        """Clear the in-flight counts of a process that exited."""
        self.counters.drop_in_flight(index, range(self._slots.highest + 1))

    def usage(self) -> dict[str, dict[str, int]]:
        """The usage of each caller, by its name; "" is for requests without a valid key."""
        if self._counters is None:
            return {}
        self._dataplane.settings.callers.publish()
        slots = {"": UNKNOWN_SLOT, **self._slots.by_name}
        return {name: self._counters.totals(slot) for name, slot in slots.items()}

    async def report_wrong_keys(self) -> None:
        """Log requests without a valid key, until cancelled."""
        await report_wrong_keys(lambda: self._counters)


class KeyCounters:
    """`index`: this process's; `highest`: the highest index that has, or had, a row. Each row is a
    large mapping, of which only used pages take memory."""

    fence = staticmethod(fence)

    def __init__(self, descriptor: int, index: int) -> None:
        self.descriptor = descriptor
        self.index = index
        self.highest = 0
        self.recent_refusals = RecentRefusals()  # the main process's part
        self._rows: dict[int, Row] = {}

    @classmethod
    def create(cls) -> KeyCounters:
        """Create the memory, in the main process. Raises OSError."""
        counters = cls(os.memfd_create("omni-proxy-keys", os.MFD_CLOEXEC), 0)
        counters.extend(0)
        return counters

    @property
    def tries(self) -> int:
        """Number of attempts to reserve a request. It is higher in processes with a lower index, so
        that of concurrent attempts one succeeds."""
        return min(2 + self.highest - self.index, MAX_TRIES)

    def extend(self, highest: int) -> None:
        """Add rows up to this index. Raises OSError."""
        self.highest = max(self.highest, highest)
        os.ftruncate(self.descriptor, (self.highest + 1) * KEY_ROW_BYTES)

    def own(self, slot: int) -> Row:
        return self._cells(self.index, slot)

    def others(self, slot: int) -> Sequence[Row]:
        return [self._cells(index, slot) for index in self._indexes() if index != self.index]

    def totals(self, slot: int) -> dict[str, int]:
        totals = slot_totals(self._cells(index, slot) for index in self._indexes())
        if slot == UNKNOWN_SLOT:
            totals["refused_last_minute"] = self.recent_refusals.count(self.refused_without_key())
        return totals

    def refused_without_key(self) -> int:
        return sum(self._cells(index, UNKNOWN_SLOT)[REFUSED_REQUESTS] for index in self._indexes())

    def in_flight(self, slot: int) -> int:
        return sum(self._cells(index, slot)[IN_FLIGHT] for index in self._indexes())

    def clear(self, slot: int) -> None:
        """Reset a slot, before it is assigned to another name."""
        for index in self._indexes():
            cells = self._cells(index, slot)
            for cell in range(SLOT_CELLS):
                cells[cell] = 0

    def drop_in_flight(self, index: int, slots: Iterable[int]) -> None:
        """Clear the in-flight counts of a process that exited. It writes to the file, because a
        mapping takes a descriptor, and there may be none left."""
        if index <= self.highest:
            for slot in slots:
                os.pwrite(self.descriptor, _ZERO, _offset(index, slot) + IN_FLIGHT * KEY_CELL_BYTES)

    def _indexes(self) -> range:
        return range(self.highest + 1)

    def _cells(self, index: int, slot: int) -> Row:
        row = self._rows.get(index)
        if row is None:
            try:
                memory = mmap.mmap(self.descriptor, KEY_ROW_BYTES, offset=index * KEY_ROW_BYTES)
            except OSError:  # no descriptor left for a mapping: a copy of the cells suffices
                if index == self.index:
                    raise
                copy = os.pread(self.descriptor, SLOT_CELLS * KEY_CELL_BYTES, _offset(index, slot))
                return memoryview(bytearray(copy)).cast("q")
            row = self._rows[index] = memoryview(memory).cast("q")
        return row[slot * SLOT_CELLS : (slot + 1) * SLOT_CELLS]


async def report_wrong_keys(find: Callable[[], KeyCounters | None]) -> None:
    """Log at intervals that requests of any process had no valid key, and record their number in
    each minute, until cancelled. `find`: returns the counters, once they exist."""
    report = WrongKeyReport()
    while True:
        await trio.sleep(REPORT_SECS)
        counters = find()
        refused = counters.refused_without_key() if counters is not None else 0
        if counters is not None:
            counters.recent_refusals.note(refused, trio.current_time())
        if more := report.due(refused, trio.current_time()):
            _log.warning("wrong_api_key requests=%d status=401", more)


def _offset(index: int, slot: int) -> int:
    """Offset in bytes of a slot of the process with this index."""
    return index * KEY_ROW_BYTES + slot * SLOT_CELLS * KEY_CELL_BYTES


class KeySlots:
    """The slots by name, as assigned by the main process."""

    def __init__(self) -> None:
        self.by_name: dict[str, int] = {}
        self.highest = UNKNOWN_SLOT
        self._released: deque[int] = deque()

    def assign(self, names: Sequence[str], counters: KeyCounters) -> Mapping[str, int]:
        for gone in self.by_name.keys() - set(names):
            self._released.append(self.by_name.pop(gone))
        for name in names:
            if name not in self.by_name:
                self.by_name[name] = self._free(counters)
        return self.by_name

    def _free(self, counters: KeyCounters) -> int:
        if self.highest < KEY_SLOTS - 1:
            self.highest += 1
            return self.highest
        while counters.in_flight(self._released[0]):
            self._released.rotate(-1)  # few requests outlive their key, so some slot is free
        slot = self._released.popleft()
        counters.clear(slot)
        return slot


class WrongKeyReport:
    def __init__(self) -> None:
        self._reported = 0
        self._due_at = -inf

    def due(self, refused: int, now: float) -> int:
        """Number of refused requests since the last line; 0 if no line is due. `refused`: total so
        far; `now`: of any clock, in seconds."""
        more = refused - self._reported
        if more <= 0 or now < self._due_at:
            return 0
        self._reported, self._due_at = refused, now + PAUSE_SECS
        return more


class RecentRefusals:
    """Number of refused requests in the last minute; as precise as the interval of `note` calls."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._before = 0  # refused before the last minute

    def note(self, refused: int, now: float) -> None:
        """`refused`: total so far; `now`: of any clock, in seconds."""
        self._marks.append((now, refused))
        while self._marks[0][0] <= now - RECENT_SECS:
            self._before = self._marks.popleft()[1]

    def count(self, refused: int) -> int:
        """Refused requests in the last minute. `refused`: total so far."""
        return refused - self._before
