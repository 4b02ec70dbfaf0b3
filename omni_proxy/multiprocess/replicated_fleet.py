"""The fleet in a data-plane process: follows the main process's snapshots and reports results.

Invariant: health is determined only by the main process. A worker's `in_flight` is the sum over all
processes, a few milliseconds old at most; if a worker has a bound, the sum is read again for each
pick and after counting, so that all processes together never exceed the bound. A process sends the
single request to a half-open worker only while it has the lease from the main process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from omni_proxy.config.fields import Role
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import (
    HALF_OPEN_IN_OTHER_PROCESS,
    RankIds,
    Worker,
    WorkerLoad,
    WorkerState,
    apply_state,
)
from omni_proxy.multiprocess.ipc.messages import (
    HalfOpenEndedEvent,
    HalfOpenStartedEvent,
    ProcessEvent,
    RequestFailedEvent,
    RequestSucceededEvent,
)
from omni_proxy.multiprocess.shared_memory.worker_counters import (
    BOUNDS_ROW,
    OFFSETS_ROW,
    PROCESS_CELL,
    Cells,
    SharedCounters,
    fence,
    unpacked_bound,
    unpacked_offset,
)

# Recounting takes a small share of the time, and counts of large fleets are a few ms old.
RECOUNT_PAUSE_SECS_PER_CELL: Final = 2e-6
MIN_RECOUNT_PAUSE_SECS: Final = 0.0002

SendEvent = Callable[[ProcessEvent], object]


_total: Any = WorkerLoad.__dict__["in_flight"]


class _SharedCount:
    """An `in_flight` that is the sum over all processes; writes go to the shared counters directly.
    In a cluster `inflight_bound` and `load_offset` are read from there, too.
    The fields are slots of the classes below, because two bases with slots can't be combined."""

    serial: int
    cell: int
    max_inflight: int
    inflight_bound: int
    load_offset: float
    _own: int
    _row: Cells

    def _begin(self, ids: tuple[int, int], row: Cells) -> None:
        """`ids`: the target's serial number, and its cell in each row."""
        self.serial, self.cell = ids
        self._row = row
        self._own = 0
        _total.__set__(self, 0)

    def _set_in_flight(self, total: int) -> None:
        self._own += total - self.in_flight
        _total.__set__(self, total)
        self._row[self.cell] = self._own

    # The sum is stored in the base's field, where reading it needs no Python frame.
    in_flight = property(_total.__get__, _set_in_flight)

    def recount(self, others: Sequence[Cells]) -> None:
        total, cell = self._own, self.cell
        for row in others:
            total += row[cell]
        _total.__set__(self, total)

    def follow_cluster(self, bounds: Cells, offsets: Cells) -> None:
        """Read the values from these rows of the shared counters, which the main process writes."""
        self.inflight_bound = unpacked_bound(bounds[self.cell], self.max_inflight)
        self.load_offset = unpacked_offset(offsets[self.cell])


class SharedWorker(_SharedCount, Worker):
    """A worker with a cell in the shared counters."""

    __slots__ = ("_own", "_row", "cell", "serial")

    def __init__(self, entry: WorkerSpec, now: datetime, ids: tuple[int, int], row: Cells) -> None:
        self._begin(ids, row)
        super().__init__(entry, now)


class SharedDpRank(_SharedCount, DpRank):
    """A data-parallel rank with a cell; its requests are also counted in its worker's cell."""

    __slots__ = ("_own", "_row", "cell", "serial")

    def __init__(self, worker: Worker, index: int, ids: tuple[int, int], row: Cells) -> None:
        self._begin(ids, row)
        super().__init__(worker, index)


def shared_ids(target: Worker) -> tuple[int, int] | None:
    """The serial number and the cell of a worker or rank; None if it has no cell."""
    return (target.serial, target.cell) if isinstance(target, _SharedCount) else None


class ReplicatedFleet(Fleet):
    """`now`: the event loop's clock."""

    def __init__(
        self, counters: SharedCounters, index: int, now: Callable[[], float], send_event: SendEvent
    ) -> None:
        super().__init__()
        self._counters = counters
        self._index = index
        self._row = counters.row(index)
        self._bounds, self._offsets = counters.row(BOUNDS_ROW), counters.row(OFFSETS_ROW)
        self._in_cluster = False
        self._now = now
        self._send_event = send_event
        self._ids_by_url: dict[
            str, tuple[int, int]
        ] = {}  # serial and cell by URL, of the newest rows
        self._rank_ids_by_url: dict[str, RankIds] = {}
        self._by_serial: dict[int, SharedWorker | SharedDpRank] = {}
        self._half_open: dict[Worker, int] = {}  # half-open requests of this process, in flight
        self._row_trials: dict[Worker, int] = {}  # half-open requests that the newest row counts
        self._expected_trials: dict[Worker, int] = {}  # count that an up-to-date row has at least
        self._recount_at = 0.0
        self.others: list[Cells] = []

    def reach(self, processes: int) -> None:
        """Use the rows of the processes up to this index."""
        rows = [index for index in range(processes + 1) if index != self._index]
        self.others = [self._counters.row(index) for index in rows]
        self.recount()

    def serial(self, serial: int) -> SharedWorker | SharedDpRank | None:
        return self._by_serial.get(serial)

    def follow(self, rows: Sequence[WorkerState], now: datetime) -> None:
        """Apply `rows` as one change: no queued request sees a part of it."""
        self._ids_by_url = {row.entry.url: (row.serial, row.cell) for row in rows}
        self._rank_ids_by_url = {row.entry.url: row.rank_ids for row in rows}
        restarted = [url for url, worker in self._by_url.items() if self._is_replaced(url, worker)]
        moved = [self._put(row) for row in rows if row.entry.url not in restarted]
        if restarted:
            self.apply([row.entry for row in rows if row.entry.url not in restarted], now)
        before = self.revision
        change = self.apply([row.entry for row in rows], now)
        for worker in change.removed:
            self._row_trials.pop(worker, None)
            self._expected_trials.pop(worker, None)
        fresh = {worker.url for worker in change.added}
        moved += [self._put(row) for row in rows if row.entry.url in fresh]
        replaced = self._follow_ranks(self._by_url.values())
        self._by_serial = {
            target.serial: target
            for target in self.targets()
            if isinstance(target, SharedWorker | SharedDpRank)
        }
        if any(moved) or fresh or self.revision != before:
            self._note_roles()
            self._note_models()
            self.recount()
            self._changed()
        self._replaced(replaced)

    def _is_replaced(self, url: str, worker: Worker) -> bool:
        place = self._ids_by_url.get(url)
        return isinstance(worker, SharedWorker) and place is not None and place[0] != worker.serial

    def _make(self, entry: WorkerSpec, now: datetime) -> Worker:
        return SharedWorker(entry, now, self._ids_by_url[entry.url], self._row)

    def _make_rank(self, worker: Worker, index: int) -> DpRank:
        ids = self._rank_ids_by_url.get(worker.url, ())
        if index >= len(ids):  # the main process does not have this rank yet
            return super()._make_rank(worker, index)
        return SharedDpRank(worker, index, ids[index], self._row)

    def _put(self, row: WorkerState) -> bool:
        worker = self._by_url.get(row.entry.url)
        if worker is None:
            return False
        moved, half_open_id = apply_state(worker, row), worker.health.half_open_id
        self._row_trials[worker] = row.half_open_count
        if worker not in self._half_open:
            owed = row.breaker_tripped and row.state is Health.HEALTHY
            blocked = row.half_open_taken or row.half_open_count < self._expected_trials.get(
                worker, 0
            )
            worker.health.half_open_id = HALF_OPEN_IN_OTHER_PROCESS if owed and blocked else 0
            if not owed:
                self._expected_trials.pop(worker, None)
        return moved or half_open_id != worker.health.half_open_id

    def candidates(self, model: str | None, mask: int) -> list[Worker]:
        if self.has_inflight_limits or self._now() >= self._recount_at:
            self.recount()
        return super().candidates(model, mask)

    def pool(self, role: Role, model: str | None, mask: int) -> list[Worker]:
        if self.has_inflight_limits or self._now() >= self._recount_at:
            self.recount()
        return super().pool(role, model, mask)

    def is_over_limit(self, worker: Worker) -> bool:
        """Each process counts before it reads, so of two processes at least one sees the other."""
        if not worker.max_inflight or not isinstance(worker, SharedWorker | SharedDpRank):
            return False
        fence()
        worker.recount(self.others)
        if worker.in_flight > worker.inflight_bound:
            return True
        return isinstance(worker, SharedDpRank) and self.is_over_limit(worker.worker)

    def recount(self) -> None:
        """Read the shared counters now."""
        others = self.others
        for worker in self._by_serial.values():
            worker.recount(others)
        in_cluster = bool(self._bounds[PROCESS_CELL])
        if in_cluster or self._in_cluster:
            self._in_cluster = in_cluster
            for worker in self._by_serial.values():
                worker.follow_cluster(self._bounds, self._offsets)
        cells = len(others) * len(self._by_serial)
        self._recount_at = self._now() + max(
            MIN_RECOUNT_PAUSE_SECS, cells * RECOUNT_PAUSE_SECS_PER_CELL
        )

    def observe_request_failure(
        self, worker: Worker, *, status: int | None, error: str, at: datetime, half_open_id: int = 0
    ) -> None:
        if isinstance(worker, SharedWorker):
            self._send_event(RequestFailedEvent(worker.serial, status, error, at, half_open_id))
            worker.health.failed_requests += 1  # so that the next success is reported

    def observe_success(self, worker: Worker, half_open_id: int = 0) -> None:
        if isinstance(worker, SharedWorker):
            self._send_event(RequestSucceededEvent(worker.serial, half_open_id))
            worker.health.failed_requests = 0  # a success is reported once

    def begin_half_open(self, worker: Worker) -> int:
        half_open_id = super().begin_half_open(worker)
        if isinstance(worker, SharedWorker):
            self._half_open[worker] = half_open_id
            self._expected_trials[worker] = self._row_trials.get(worker, 0) + 1
            self._send_event(HalfOpenStartedEvent(worker.serial, half_open_id))
        return half_open_id

    def end_half_open(self, worker: Worker, half_open_id: int) -> None:
        """The main process determines which process may send the next request."""
        if self._half_open.get(worker) != half_open_id:
            return
        del self._half_open[worker]
        if isinstance(worker, SharedWorker):
            self._send_event(HalfOpenEndedEvent(worker.serial, half_open_id))
        worker.health.half_open_id = (
            HALF_OPEN_IN_OTHER_PROCESS if worker.health.breaker_tripped else 0
        )
        self._changed(worker)
