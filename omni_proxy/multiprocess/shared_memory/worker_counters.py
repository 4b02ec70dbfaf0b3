"""Requests in flight by worker, in memory that all processes share.

`SharedCounters` is the memory, one row of cells for each process; `FreeSlots` manages free cells.
Invariant: every cell has one writer, the process of its row, so no update is lost without locks;
the main process takes over a row when its process has exited. Row 0 is the main process's and
includes the requests of a cluster's other proxies; cell 0 of a row counts all requests of its
process. `WorkerIds` assigns serial numbers, which are never reused, and cells, which are released
after the worker is removed. After each `recount`, `in_flight` of the main process's workers is the
sum over all rows.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final

from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import Worker, WorkerState, worker_state

# Rows with the workers' `inflight_bound` and `load_offset`, see `WorkerIds.share_cluster_state`.
BOUNDS_ROW: Final = 1025  # [server] processes is at most 1024, and row 0 is the main process's
OFFSETS_ROW: Final = 1026
ROWS: Final = OFFSETS_ROW + 1
CELLS: Final = 1 << 16
CELL_BYTES: Final = 4
PROCESS_CELL: Final = 0  # of a row: all requests of its process

Cells = memoryview  # of unsigned 32-bit integers

_fence = Lock()
_fence.acquire()


def fence() -> None:
    """A full memory barrier: earlier writes are visible to all processes before later reads.

    Without it a processor may reorder a write after later reads, so that of two processes that
    count and then read, neither sees the other. Releasing and acquiring a lock prevents that.
    """
    _fence.release()
    _fence.acquire()


OFFSET_STEPS: Final = 1024  # in one request
_NO_OFFSET: Final = 1 << 31
_HIGHEST: Final = (1 << 8 * CELL_BYTES) - 1


def packed_offset(offset: float) -> int:
    """The offset as a cell's value, limited to what fits; 0 for 0."""
    if not offset:
        return 0
    return min(max(int(offset * OFFSET_STEPS) + _NO_OFFSET, 1), _HIGHEST)


def unpacked_offset(cell: int) -> float:
    return (cell - _NO_OFFSET) / OFFSET_STEPS if cell else 0  # CPython adds ints faster


def unpacked_bound(cell: int, max_inflight: int) -> int:
    """The bound in a cell, which is stored plus 1; 0 means the worker's own bound."""
    return cell - 1 if cell else max_inflight


class SharedCounters:
    """A large mapping, of which only used pages take memory."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        size = ROWS * CELLS * CELL_BYTES
        self._cells = memoryview(mmap.mmap(descriptor, size)).cast("I")

    @classmethod
    def create(cls) -> SharedCounters:
        """Raises OSError."""
        descriptor = os.memfd_create("omni-proxy-counts", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, ROWS * CELLS * CELL_BYTES)
        return cls(descriptor)

    def row(self, index: int) -> Cells:
        return self._cells[index * CELLS : (index + 1) * CELLS]

    def clear(self, index: int, upto: int) -> None:
        """Zero the row of a process that has exited. `upto`: the highest cell."""
        row = self.row(index)
        for cell in range(upto + 1):
            if row[cell]:
                row[cell] = 0


class FreeSlots:
    """`count` cells, from 1 on; the last one is shared by all workers for which none is free. Pure.

    The cell that was released longest ago is reused first: a process with an older snapshot may
    still write to a released cell.
    """

    def __init__(self, count: int) -> None:
        self.highest = 0  # highest cell that was ever in use
        self._last = count
        self._free: deque[int] = deque()

    def acquire(self, in_use: Callable[[int], bool]) -> int:
        """`in_use(cell)`: whether the cell is not zero yet."""
        if self.highest < self._last - 1:
            self.highest += 1
            return self.highest
        for _ in range(len(self._free)):
            cell = self._free.popleft()
            if not in_use(cell):
                return cell
            self._free.append(cell)
        self.highest = self._last
        return self._last

    def release(self, cell: int) -> None:
        if cell != self._last:
            self._free.append(cell)


class WorkerIds:
    """`processes`: the highest index of a process that has a row. `cells`: how many cells workers
    may have. `counters`: existing memory, instead of memory that is created when it is needed."""

    def __init__(
        self,
        fleet: Fleet,
        dataplane: DataPlane,
        *,
        cells: int = CELLS - 1,  # cell 0 is no worker's
        counters: SharedCounters | None = None,
    ) -> None:
        self._fleet = fleet
        self._dataplane = dataplane
        self._counters = counters
        self._cells = FreeSlots(cells)
        self._ids: dict[Worker, tuple[int, int]] = {}  # of workers and ranks: serial, cell
        self._workers: dict[int, Worker] = {}
        self._other_in_flight: dict[Worker, int] = {}
        self._last_serial = 0
        self.processes = 0
        self.in_flight = 0
        self.peak_in_flight = 0

    @property
    def counters(self) -> SharedCounters:
        """Created with the first data-plane process. Raises OSError."""
        if self._counters is None:
            self._counters = SharedCounters.create()
            for target in self._ids:
                self.share_cluster_state(target)
        return self._counters

    @property
    def voices(self) -> VoiceRegistry:
        return self._dataplane.voices

    def in_flight_at(self, index: int) -> int:
        return self._counters.row(index)[PROCESS_CELL] if self._counters is not None else 0

    def find(self, serial: int) -> Worker | None:
        return self._workers.get(serial)

    def serial(self, worker: Worker) -> int:
        return self._ids_of(worker)[0]

    def ids(self, worker: Worker) -> tuple[int, int] | None:
        """The serial number and the cell of a worker or rank; None after its removal from the
        fleet."""
        known, of = self._ids.get(worker), worker.worker
        if known is None and self._fleet.find(of.url) is of:
            known = self._ids_of(worker)
        return known

    def rows(self) -> tuple[WorkerState, ...]:
        return tuple(
            worker_state(
                worker,
                *self._ids_of(worker),
                tuple(map(self._ids_of, self._fleet.known_ranks(worker))),
            )
            for worker in self._fleet.workers
        )

    def _ids_of(self, worker: Worker) -> tuple[int, int]:
        ids = self._ids.get(worker)
        if ids is None:
            self._last_serial += 1
            ids = self._ids[worker] = self._last_serial, self._cells.acquire(self._in_use)
            self._workers[self._last_serial] = worker
            if self._counters is not None:
                self._counters.row(0)[ids[1]] = worker.in_flight
                self.share_cluster_state(worker)
        return ids

    def _in_use(self, cell: int) -> bool:
        """Whether a process still counts requests of a removed worker in the cell."""
        if self._counters is None:
            return False
        return any(self._counters.row(index)[cell] for index in range(self.processes + 1))

    def clear(self, index: int) -> None:
        """Clear the row of a process that has exited."""
        if self._counters is not None:  # otherwise no process was ever started
            self._counters.clear(index, self._cells.highest)
        self.recount()

    def recount(self) -> None:
        """Write the main process's row, and sum the rows of the others."""
        if self._counters is None:
            self.in_flight = self._dataplane.in_flight
            return
        own_row = self._counters.row(0)
        others = [self._counters.row(index) for index in range(1, self.processes + 1)]
        inflight = self._dataplane.inflight
        own_row[PROCESS_CELL] = inflight.in_flight + inflight.elsewhere
        self.in_flight = self._dataplane.in_flight + sum(row[PROCESS_CELL] for row in others)
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        members = set(self._fleet.workers)
        for worker, (serial, cell) in list(self._ids.items()):
            before = self._other_in_flight.get(worker, 0)
            other = sum(row[cell] for row in others)
            own_row[cell] = worker.in_flight - before
            self._other_in_flight[worker] = other
            if other != before:
                worker.in_flight += other - before
                worker.peak_in_flight = max(worker.peak_in_flight, worker.in_flight)
            if worker.worker not in members and not worker.in_flight:
                self._drop(worker, serial, cell)

    def follow_cluster(self, *, member: bool) -> None:
        """Publish whether the proxy is a member of a cluster."""
        if self._counters is not None:
            self._counters.row(BOUNDS_ROW)[PROCESS_CELL] = member

    def share_cluster_state(self, target: Worker) -> None:
        """Publish the target's `inflight_bound` and `load_offset` to all processes."""
        ids = self._ids.get(target)
        if self._counters is not None and ids is not None:
            limited = target.inflight_bound != target.max_inflight
            bound = min(target.inflight_bound + 1, _HIGHEST) if limited else 0
            self._counters.row(BOUNDS_ROW)[ids[1]] = bound
            self._counters.row(OFFSETS_ROW)[ids[1]] = packed_offset(target.load_offset)

    def _drop(self, worker: Worker, serial: int, cell: int) -> None:
        """Release the ids of a removed worker whose last request has ended. A request that a
        process sends to it now, before its next snapshot, is not counted."""
        if self._counters is not None:
            self._counters.row(BOUNDS_ROW)[cell] = self._counters.row(OFFSETS_ROW)[cell] = 0
        del self._ids[worker]
        del self._workers[serial]
        self._cells.release(cell)
        self._other_in_flight.pop(worker, None)
