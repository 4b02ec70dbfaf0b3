"""The fleet as a door has it: it follows what control tells, and tells what requests have shown.

Invariant: nothing here judges health. A worker's `in_flight` is that of all doors, at most a moment
old; where a worker has a bound it is read anew for each pick and again behind the count, so that
all doors together never pass a bound. A trial is begun only where control has left it to this door.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.fleet.worker_state import HALF_OPEN_ELSEWHERE, WorkerState, apply_state
from omni_proxy.multiprocess.messages import Failed, Good, ToControl, TrialBegan, TrialEnded
from omni_proxy.multiprocess.shared_counters import Cells, SharedCounters, fence

# A look at one cell costs some 0.15 us: with this pause behind each, looking takes less than a
# tenth of the time, and with 500 workers and 4 doors counts are at most 4 ms old.
PAUSE_SECS_PER_CELL: Final = 2e-6
LEAST_PAUSE_SECS: Final = 0.0002

Tell = Callable[[ToControl], object]


class SharedWorker(Worker):
    """`in_flight` may be raised and lowered as ever; the board hears of it at once."""

    __slots__ = ("_own", "_row", "_total", "cell", "serial")

    def __init__(
        self, entry: WorkerSpec, now: datetime, place: tuple[int, int], row: Cells
    ) -> None:
        """`place`: its serial number, its cell in each row."""
        self.serial, self.cell = place
        self._row = row
        self._own = self._total = 0
        super().__init__(entry, now)

    @property
    def in_flight(self) -> int:
        return self._total

    @in_flight.setter
    def in_flight(self, total: int) -> None:
        self._own += total - self._total
        self._total = total
        self._row[self.cell] = self._own

    def recount(self, others: Sequence[Cells]) -> None:
        total, cell = self._own, self.cell
        for row in others:
            total += row[cell]
        self._total = total


class ReplicatedFleet(Fleet):
    """`now` is the pump's clock."""

    def __init__(
        self, board: SharedCounters, index: int, now: Callable[[], float], tell: Tell
    ) -> None:
        super().__init__()
        self._board = board
        self._index = index
        self._row = board.row(index)
        self._now = now
        self._tell = tell
        self._places: dict[str, tuple[int, int]] = {}  # of the rows that are being followed
        self._by_serial: dict[int, SharedWorker] = {}
        self._begun: dict[Worker, int] = {}  # trials of ours that have not ended
        self._given: dict[Worker, int] = {}  # trials that it had been given by the newest row
        self._known: dict[Worker, int] = {}  # how many a row must know of to be believed
        self._recount_at = 0.0
        self.others: list[Cells] = []

    def reach(self, doors: int) -> None:
        """Rows up to that index are in use."""
        rows = [index for index in range(doors + 1) if index != self._index]
        self.others = [self._board.row(index) for index in rows]
        self.recount()

    def serial(self, serial: int) -> SharedWorker | None:
        return self._by_serial.get(serial)

    def follow(self, rows: Sequence[WorkerState], now: datetime) -> None:
        """Become what `rows` say, as one change: nobody is let go by half of it."""
        self._places = {row.entry.url: (row.serial, row.cell) for row in rows}
        replaced = [url for url, worker in self._by_url.items() if self._other(url, worker)]
        moved = [self._put(row) for row in rows if row.entry.url not in replaced]
        if replaced:
            self.apply([row.entry for row in rows if row.entry.url not in replaced], now)
        before = self.revision
        change = self.apply([row.entry for row in rows], now)
        self._by_serial = {
            w.serial: w for w in self._by_url.values() if isinstance(w, SharedWorker)
        }
        for worker in change.removed:
            self._given.pop(worker, None)
            self._known.pop(worker, None)
        fresh = {worker.url for worker in change.added}
        moved += [self._put(row) for row in rows if row.entry.url in fresh]
        if any(moved) or fresh or self.revision != before:
            self.recount()
            self._changed()

    def _other(self, url: str, worker: Worker) -> bool:
        place = self._places.get(url)
        return isinstance(worker, SharedWorker) and place is not None and place[0] != worker.serial

    def _make(self, entry: WorkerSpec, now: datetime) -> Worker:
        return SharedWorker(entry, now, self._places[entry.url], self._row)

    def _put(self, row: WorkerState) -> bool:
        worker = self._by_url.get(row.entry.url)
        if worker is None:
            return False
        moved, half_open_id = apply_state(worker, row), worker.health.half_open_id
        self._given[worker] = row.half_open_count
        if worker not in self._begun:
            owed = row.breaker_tripped and row.state is Health.HEALTHY
            blocked = row.half_open_taken or row.half_open_count < self._known.get(worker, 0)
            worker.health.half_open_id = HALF_OPEN_ELSEWHERE if owed and blocked else 0
            if not owed:
                self._known.pop(worker, None)
        return moved or half_open_id != worker.health.half_open_id

    def candidates(self, model: str | None, mask: int) -> list[Worker]:
        if self.has_inflight_limits or self._now() >= self._recount_at:
            self.recount()
        return super().candidates(model, mask)

    def is_over_limit(self, worker: Worker) -> bool:
        """Each counts first and looks then, so of two at the same place one at least sees it."""
        if not worker.max_inflight or not isinstance(worker, SharedWorker):
            return False
        fence()
        worker.recount(self.others)
        return worker.in_flight > worker.max_inflight

    def recount(self) -> None:
        """What all doors have in flight, now."""
        others = self.others
        for worker in self._by_serial.values():
            worker.recount(others)
        cells = len(others) * len(self._by_serial)
        self._recount_at = self._now() + max(LEAST_PAUSE_SECS, cells * PAUSE_SECS_PER_CELL)

    def observe_request_failure(
        self, worker: Worker, *, status: int | None, error: str, at: datetime, half_open_id: int = 0
    ) -> None:
        if isinstance(worker, SharedWorker):
            self._tell(Failed(worker.serial, status, error, at, half_open_id))
            worker.health.failed_requests += 1  # so that a good answer is told too

    def observe_success(self, worker: Worker, half_open_id: int = 0) -> None:
        if isinstance(worker, SharedWorker):
            self._tell(Good(worker.serial, half_open_id))
            worker.health.failed_requests = 0  # once is enough

    def begin_half_open(self, worker: Worker) -> int:
        half_open_id = super().begin_half_open(worker)
        if isinstance(worker, SharedWorker):
            self._begun[worker] = half_open_id
            self._known[worker] = self._given.get(worker, 0) + 1
            self._tell(TrialBegan(worker.serial, half_open_id))
        return half_open_id

    def end_half_open(self, worker: Worker, half_open_id: int) -> None:
        """Who may begin the next one, if any, control will say."""
        if self._begun.get(worker) != half_open_id:
            return
        del self._begun[worker]
        if isinstance(worker, SharedWorker):
            self._tell(TrialEnded(worker.serial, half_open_id))
        worker.health.half_open_id = HALF_OPEN_ELSEWHERE if worker.health.breaker_tripped else 0
        self._changed(worker)
