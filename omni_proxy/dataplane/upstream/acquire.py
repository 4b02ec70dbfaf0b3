"""A worker is taken for a try, and left when that is over: the counts, the trial, the bounds.

Invariant: whoever was taken is left exactly once, and no worker has more in flight than its
`max_inflight`, over all doors. Nothing is awaited between the choice and the count.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.pick import no_worker_error, pick_worker

if TYPE_CHECKING:
    from omni_proxy.dataplane.dataplane import DataPlane
    from omni_proxy.dataplane.exchange.exchange import Exchange

# Two doors that step back from one place see each other gone; not even once in a million the third
# time.
CHOICES: Final = 3


def take(door: DataPlane, mine: Exchange, tried: Collection[Worker] = ()) -> Worker:
    """A try begins at the worker that this returns. Raises Refusal: nobody could take it."""
    need, fleet = mine.need, door.fleet
    assert need is not None
    worker = pick_worker(fleet, need, door.policy, tried, door.voice_owner)
    worker.in_flight += 1
    if fleet.has_inflight_limits and fleet.is_over_limit(worker):
        worker = _take_again(door, mine, tried, worker)
    mine.worker = worker
    mine.version = worker.version
    if door.route_log is not None:
        mine.worker_seen = (worker.health.state.value, worker.disabled, worker.routable)
    mine.attempts += 1
    if worker.in_flight > worker.peak_in_flight:
        worker.peak_in_flight = worker.in_flight
    if worker.health.breaker_tripped:
        mine.half_open_id = fleet.begin_half_open(worker)
    if mine.route is not None:
        worker.counts[mine.route.counter_index] += 1
    return worker


def _take_again(door: DataPlane, mine: Exchange, tried: Collection[Worker], full: Worker) -> Worker:
    """Another door has taken the last place of `full` in the same moment, or half taken it, too."""
    need, fleet = mine.need, door.fleet
    assert need is not None
    full.in_flight -= 1
    for _ in range(CHOICES - 1):
        worker = pick_worker(fleet, need, door.policy, tried, door.voice_owner)
        worker.in_flight += 1
        if not fleet.is_over_limit(worker):
            return worker
        worker.in_flight -= 1
    raise no_worker_error(fleet, need, door.voice_owner)


def leave(door: DataPlane, mine: Exchange, end: int) -> None:
    """The try at the present worker, if any, is over, SUCCEEDED or FAILED; whoever calls it has the
    queue served."""
    worker, mine.worker = mine.worker, None
    mine.last_worker = worker or mine.last_worker
    if worker is not None:
        worker.in_flight -= 1
        if mine.half_open_id:
            door.fleet.end_half_open(worker, mine.half_open_id)
            mine.half_open_id = 0
        if mine.route is not None:
            worker.counts[mine.route.counter_index + end] += 1
