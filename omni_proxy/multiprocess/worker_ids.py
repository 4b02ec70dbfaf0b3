"""The workers by number, and what all processes together have in flight with each.

Invariant: a number belongs to one worker for ever, its cell of the board until it is gone.
`in_flight` of control's workers is the sum over all rows of the board after each `recount`; what
control's own door has there is in row 0.
"""

from __future__ import annotations

from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voices import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.fleet.worker_state import WorkerState, worker_state
from omni_proxy.multiprocess.shared_counters import CELLS, FreeSlots, SharedCounters
from omni_proxy.multiprocess.shared_dataplane import DOOR_CELL


class WorkerIds:
    """`multiprocess`: the highest index of a door process that has a row."""

    def __init__(self, fleet: Fleet, door: DataPlane) -> None:
        self._fleet = fleet
        self._door = door
        self._board: SharedCounters | None = None
        self._cells = FreeSlots(CELLS - 1)  # cell 0 is no worker's
        self._known: dict[Worker, tuple[int, int]] = {}  # serial, cell
        self._workers: dict[int, Worker] = {}
        self._elsewhere: dict[Worker, int] = {}
        self._made = 0
        self.doors = 0
        self.in_flight = 0
        self.peak_in_flight = 0

    @property
    def board(self) -> SharedCounters:
        """Made when the first door is. Raises OSError."""
        if self._board is None:
            self._board = SharedCounters.made()
        return self._board

    @property
    def voices(self) -> VoiceRegistry:
        return self._door.voices

    def in_flight_at(self, index: int) -> int:
        return self._board.row(index)[DOOR_CELL] if self._board is not None else 0

    def find(self, serial: int) -> Worker | None:
        return self._workers.get(serial)

    def serial(self, worker: Worker) -> int:
        return self._place(worker)[0]

    def rows(self) -> tuple[WorkerState, ...]:
        return tuple(worker_state(worker, *self._place(worker)) for worker in self._fleet.workers)

    def _place(self, worker: Worker) -> tuple[int, int]:
        place = self._known.get(worker)
        if place is None:
            self._made += 1
            place = self._known[worker] = self._made, self._cells.take(self._in_use)
            self._workers[self._made] = worker
        return place

    def _in_use(self, cell: int) -> bool:
        """A process still counts there for a worker that is gone."""
        if self._board is None:
            return False
        return any(self._board.row(index)[cell] for index in range(self.doors + 1))

    def clear(self, index: int) -> None:
        """Its process has ended."""
        if self._board is not None:  # else it has never begun
            self._board.clear(index, self._cells.highest)
        self.recount()

    def recount(self) -> None:
        """Tell what is ours, and take in what is the others'."""
        if self._board is None:
            self.in_flight = self._door.in_flight
            return
        own = self._board.row(0)
        others = [self._board.row(index) for index in range(1, self.doors + 1)]
        own[DOOR_CELL] = self._door.in_flight
        self.in_flight = self._door.in_flight + sum(row[DOOR_CELL] for row in others)
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        here = set(self._fleet.workers)
        for worker, (serial, cell) in list(self._known.items()):
            before = self._elsewhere.get(worker, 0)
            elsewhere = sum(row[cell] for row in others)
            own[cell] = worker.in_flight - before
            self._elsewhere[worker] = elsewhere
            if elsewhere != before:
                worker.in_flight += elsewhere - before
                worker.peak_in_flight = max(worker.peak_in_flight, worker.in_flight)
            if worker not in here and not worker.in_flight:
                self._forget(worker, serial, cell)

    def _forget(self, worker: Worker, serial: int, cell: int) -> None:
        """It was removed, and its last request has ended. One that a door sends it even now, not
        having heard of it, is counted nowhere."""
        del self._known[worker]
        del self._workers[serial]
        self._cells.give_back(cell)
        self._elsewhere.pop(worker, None)
