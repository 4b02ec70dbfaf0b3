"""What a door has counted since it last told: taken out of its meters, and put into control's.

Invariant: `taken` empties what it takes, so each exchange is told once; what a door had not told
when it was killed (a quarter of a second's) is lost. Both ends use the same cells, so the sums over
all doors are those that one process would have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker, zero_counters
from omni_proxy.multiprocess.messages import CellTally, EndTally, SlotTally, Spread, Tally
from omni_proxy.multiprocess.replicated_fleet import SharedWorker
from omni_proxy.telemetry.histogram import Histogram, LateHistogram
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import End, RecentWindow, Slot
from omni_proxy.telemetry.series import Cell, Phases

WHOLE_DOOR = -1
PHASES = ("queue", "connect", "head", "overhead", "longest_gap")

Find = Callable[[int], Worker | None]


class MetricsDelta(Metrics):
    """Metrics whose contents go elsewhere every moment."""

    def __init__(self, fleet: Fleet) -> None:
        self._between: dict[tuple[str, Worker | None], LateHistogram] = {}
        super().__init__(fleet, RecentDelta())

    def cell(self, route: str, worker: Worker | None) -> Cell:
        """A stream goes on counting where it began to: that outlives the cell."""
        cell = super().cell(route, worker)
        cell.between = self._between.setdefault((route, worker), cell.between)
        return cell

    def forget_strangers(self) -> None:
        super().forget_strangers()
        here = {*self._fleet.workers, None}
        for key in [key for key in self._between if key[1] not in here]:
            del self._between[key]

    def taken(self) -> Tally:
        going_on = {key: of for key, of in self._between.items() if any(of.counts)}
        for route, worker in going_on:
            self.cell(route, worker)
        tally = self._taken()
        for between in going_on.values():
            between.clear()
        return tally

    def _taken(self) -> Tally:
        cells, self._cells = self.cells, {}
        phases, self._phases = self.phases, {}
        tries, self.failed_tries = self.failed_tries, Counter()
        retries, self.retries = self.retries, 0
        recent, self._recent = self._recent, RecentDelta()
        assert isinstance(recent, RecentDelta)
        return Tally(
            cells=[_of_cell(route, worker, cell) for (route, worker), cell in cells.items()],
            phases={route: _of_phases(each) for route, each in phases.items()},
            slots=recent.slots(),
            ends=recent.told(),
            failed_tries=[(_serial(w), cause, count) for (w, cause), count in tries.items()],
            retries=retries,
            worker_ends=_of_workers(self._fleet.workers),
        )


class RecentDelta(RecentWindow):
    def slots(self) -> list[SlotTally]:
        second = self.second_so_far()
        if not second.requests:
            return []
        slots = [(WHOLE_DOOR, second)]
        slots += [(_serial(worker), slot) for worker, slot in self.sums.items()]
        return [
            SlotTally(serial, slot.requests, slot.errors, _sparse(slot.firsts))
            for serial, slot in slots
        ]

    def told(self) -> list[EndTally]:
        well = [EndTally(False, tuple(end)) for end in self._ends]
        return well + [EndTally(True, tuple(end)) for end in self._troubles]


def add(tally: Tally, meters: Metrics, recent: RecentWindow, find: Find) -> None:
    """`find` knows workers by their serial; what was counted for one that is gone is dropped."""
    for told in tally.cells:
        worker = find(told.serial)
        if worker is not None or not told.serial:
            _add_cell(told, meters, worker)
    for route, spreads in tally.phases.items():
        phases = meters.phases_of(route)
        for name, spread in zip(PHASES, spreads, strict=True):
            _add_spread(getattr(phases, name), spread)
    for serial, cause, count in tally.failed_tries:
        worker = find(serial)
        if worker is not None:
            meters.failed_tries[worker, cause] += count
    meters.retries += tally.retries
    _add_recent(tally, recent, find)
    for serial, traffic, routed, succeeded, failed in tally.worker_ends:
        worker = find(serial)
        if worker is not None:
            worker.add_counts(traffic, routed=routed, succeeded=succeeded, failed=failed)


def _serial(worker: Worker | None) -> int:
    return worker.serial if isinstance(worker, SharedWorker) else 0


def _sparse(counts: list[int]) -> dict[int, int]:
    return {place: count for place, count in enumerate(counts) if count}


def _spread(of: Histogram) -> Spread:
    return Spread(_sparse(of.counts), of.sum)


def _of_cell(route: str, worker: Worker | None, cell: Cell) -> CellTally:
    return CellTally(
        route=route,
        serial=_serial(worker),
        ends=[(*key, count) for key, count in cell.ends.items()],
        spreads=(_spread(cell.total), _spread(cell.first), _spread(cell.between)),
        sums=(cell.bytes_in, cell.bytes_out, cell.pieces),
        tokens=[(*key, count) for key, count in cell.tokens.items()],
    )


def _of_phases(phases: Phases) -> list[Spread]:
    return [_spread(getattr(phases, name)) for name in PHASES]


def _of_workers(workers: list[Worker]) -> list[tuple[int, str, int, int, int]]:
    rows = []
    for worker in workers:
        routed, succeeded, failed = worker.routed, worker.succeeded, worker.failed
        for traffic in {**routed, **succeeded, **failed}:
            ends = (succeeded.get(traffic, 0), failed.get(traffic, 0))
            rows.append((_serial(worker), traffic, routed.get(traffic, 0), *ends))
        worker.counts = zero_counters()
    return rows


def _add_cell(told: CellTally, meters: Metrics, worker: Worker | None) -> None:
    cell = meters.cell(told.route, worker)
    for model, hundreds, end, count in told.ends:
        key = (model, hundreds, end)
        cell.ends[key] = cell.ends.get(key, 0) + count
    for of, spread in zip((cell.total, cell.first, cell.between), told.spreads, strict=True):
        _add_spread(of, spread)
    cell.bytes_in += told.sums[0]
    cell.bytes_out += told.sums[1]
    cell.pieces += told.sums[2]
    for model, kind, count in told.tokens:
        cell.tokens[model, kind] += count


def _add_spread(of: Histogram, spread: Spread) -> None:
    for place, count in spread.places.items():
        of.counts[place] += count
    of.sum += spread.sum


def _add_recent(tally: Tally, recent: RecentWindow, find: Find) -> None:
    for slot in tally.slots:
        _add_slot(slot, recent, find)
    for noted in tally.ends:
        recent.add(End(*noted.end), trouble=noted.trouble)


def _add_slot(told: SlotTally, recent: RecentWindow, find: Find) -> None:
    worker = find(told.serial)
    if told.serial == WHOLE_DOOR:
        slot: Slot = recent.second
    elif worker is None and told.serial:
        return
    else:
        slot = recent.sums.setdefault(worker, Slot())
    slot.requests += told.requests
    slot.errors += told.errors
    for place, count in told.firsts.items():
        slot.firsts[place] += count
