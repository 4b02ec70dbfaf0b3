"""What the door counts of each exchange that has ended, in plain ints.

Invariant: `count` costs less than 3 us and neither waits nor fails. Its labels are bounded: routes
are those of the table, workers those of the fleet, and a model that no worker names is "other".
Nothing here reads a body, but for the last piece of one where `usage` is wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.observe.histogram import (
    BETWEEN_CHUNKS,
    DURATION,
    FINE,
    FIRST_CHUNK,
    LONGEST_GAP,
    SHORT,
    Histogram,
)
from omni_proxy.observe.recent import ENDS_PER_SECOND, Recent
from omni_proxy.observe.usage import TAIL_BYTES, tokens_in

if TYPE_CHECKING:
    from omni_proxy.door.account import Exchange

OTHER: Final = "other"
FRONT: Final = "front"  # the route of whatever is not model traffic
UNREAD: Final = "unread"  # no head that could be read

K = TypeVar("K")
End = tuple[str | None, int, str]  # model, hundreds of the status, how it ended


class Phases:
    """The times of one route, over all workers."""

    __slots__ = ("connect", "head", "longest_gap", "overhead", "queue")

    def __init__(self) -> None:
        self.queue = Histogram(DURATION)
        self.connect = Histogram(SHORT)
        self.head = Histogram(FIRST_CHUNK)
        self.longest_gap = Histogram(LONGEST_GAP)
        self.overhead = Histogram(SHORT)


class Cell:
    """One route on one worker; no worker where nobody was tried."""

    __slots__ = (
        "between", "bytes_in", "bytes_out", "ends", "first", "phases", "pieces", "tokens", "total",
    )  # fmt: skip

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self.ends: dict[End, int] = {}
        self.total = Histogram(DURATION)
        self.first = Histogram(FINE)
        self.between = Histogram(BETWEEN_CHUNKS)
        self.bytes_in = self.bytes_out = self.pieces = 0
        self.tokens: Counter[tuple[str | None, str]] = Counter()  # model, type


class Meters:
    """Of the running program, for as long as it runs; whoever is removed from the fleet is
    forgotten."""

    def __init__(self, fleet: Fleet, recent: Recent) -> None:
        self.cells: dict[tuple[str, Worker | None], Cell] = {}
        self.phases: dict[str, Phases] = {}
        self.failed_tries: Counter[tuple[Worker, str]] = Counter()
        self.ejections: Counter[Worker] = Counter()
        self.health_changes: Counter[tuple[Worker, Health]] = Counter()
        self.retries = 0
        self._fleet = fleet
        self._recent = recent
        self._members: list[Worker] = []
        fleet.watch(self._follow_fleet)
        fleet.watch_ejected(self._ejected)
        fleet.watch_health(self._changed)

    def count(self, mine: Exchange, worker: Worker | None) -> None:
        """`mine` has ended; nothing of it is kept. In one frame on purpose: it is paid for each."""
        route = mine.route
        if route is None:
            self._count_front(mine)
            return
        cell = self.cells.get((route.path, worker)) or self._new(route.path, worker)
        status, end, ended = mine.status, mine.outcome or "cut_by_proxy", mine.ended_at
        model = mine.need.model if mine.need is not None else None
        if model is not None and (worker is None or model != worker.model):
            model = model if self._fleet.names(model) else OTHER
        key = (model, status // 100, end)
        cell.ends[key] = cell.ends.get(key, 0) + 1
        cell.bytes_in += mine.bytes_in
        cell.bytes_out += mine.bytes_out
        cell.pieces += mine.pieces
        secs = ended - mine.started_at
        cell.total.counts[bisect_left(DURATION, secs)] += 1
        cell.total.sum += secs
        first, place = mine.first_at, -1
        if first:
            secs = first - mine.started_at
            place = bisect_left(FINE, secs)
            cell.first.counts[place] += 1
            cell.first.sum += secs
            if mine.pieces > 1 and mine.stream:
                self._count_gaps(mine, cell)
        phases, dialled = cell.phases, mine.dialled_at
        if dialled:
            if mine.wait_at:
                secs = mine.wait_at - dialled
                phases.head.counts[bisect_left(FIRST_CHUNK, secs)] += 1
                phases.head.sum += secs
            secs = mine.own_secs + monotonic() - ended
            phases.overhead.counts[bisect_left(SHORT, secs)] += 1
            phases.overhead.sum += secs
        if mine.queued_secs or mine.connect_secs or mine.tail or mine.tried is not None:
            self._count_rarer(mine, cell, model)
        self._count_lately(mine, worker, place)

    def _count_lately(self, mine: Exchange, worker: Worker | None, place: int) -> None:
        """`place` in FINE: when the first chunk came for the client; -1 where none did."""
        recent = self._recent
        second = recent.second
        second.requests += 1
        slot = recent.slots_now.get(worker) or recent.open_slot(worker)
        slot.requests += 1
        if place >= 0:
            second.firsts[place] += 1
            if mine.dialled_at != mine.started_at:  # what came before is not the worker's
                place = bisect_left(FINE, mine.first_at - mine.dialled_at)
            slot.firsts[place] += 1
        if mine.status >= 400 or mine.outcome != "completed" or mine.attempts > 1:
            recent.note_trouble(mine, worker, slot)
        elif second.requests <= ENDS_PER_SECOND:
            recent.note_end(mine, worker)

    def _count_front(self, mine: Exchange) -> None:
        route = FRONT if mine.method != "-" else UNREAD
        cell = self.cells.get((route, None)) or self._new(route, None)
        key = (None, mine.status // 100, mine.outcome or "cut_by_proxy")
        cell.ends[key] = cell.ends.get(key, 0) + 1
        cell.bytes_in += mine.bytes_in
        cell.bytes_out += mine.bytes_out

    def _count_gaps(self, mine: Exchange, cell: Cell) -> None:
        if mine.outcome == "completed":
            cell.between.observe((mine.ended_at - mine.first_at) / (mine.pieces - 1))
        if mine.longest_gap:
            cell.phases.longest_gap.observe(mine.longest_gap)

    def _count_rarer(self, mine: Exchange, cell: Cell, model: str | None) -> None:
        if mine.queued_secs:
            cell.phases.queue.observe(mine.queued_secs)
        if mine.connect_secs:
            cell.phases.connect.observe(mine.connect_secs)
        if mine.tried:
            self.retries += mine.attempts - 1
            for worker, cause in mine.tried:
                self.failed_tries[worker, cause] += 1
        if mine.tail:
            for kind, count in tokens_in(mine.tail[-TAIL_BYTES:]).items():
                cell.tokens[model, kind] += count

    def _new(self, route: str, worker: Worker | None) -> Cell:
        phases = self.phases.get(route)
        if phases is None:
            phases = self.phases[route] = Phases()
        cell = self.cells[route, worker] = Cell(phases)
        return cell

    def _ejected(self, worker: Worker) -> None:
        self.ejections[worker] += 1

    def _changed(self, worker: Worker, _: Health) -> None:
        self.health_changes[worker, worker.machine.state] += 1

    def _follow_fleet(self) -> None:
        members = self._fleet.workers
        if members != self._members:
            self._members = members
            self.forget_strangers()

    def forget_strangers(self) -> None:
        """Who is not in the fleet any more; an exchange of one may have ended after it went."""
        here = {*self._fleet.workers, None}
        self.cells = {key: cell for key, cell in self.cells.items() if key[1] in here}
        _keep(self.failed_tries, {key for key in self.failed_tries if key[0] in here})
        _keep(self.health_changes, {key for key in self.health_changes if key[0] in here})
        _keep(self.ejections, {worker for worker in self.ejections if worker in here})


def _keep(counted: Counter[K], wanted: set[K]) -> None:
    for key in counted.keys() - wanted:
        del counted[key]
