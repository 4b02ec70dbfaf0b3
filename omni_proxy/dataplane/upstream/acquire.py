"""Acquire a worker for an attempt and release it at the attempt's end: counts, trials, bounds.

Invariant: a worker that was acquired is released exactly once, and no worker has more in flight
than its `max_inflight`, over all data-plane processes; the same holds for a data-parallel rank,
which is counted with its worker. Nothing is awaited between the choice and the count.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Final

from omni_proxy.dataplane.exchange.exchange import Exchange, Recorders
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.affinity_key import AffinityKeyReader
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import (
    eligible_workers,
    no_worker_error,
    pick_worker,
    workers_held_for_update,
)
from omni_proxy.routing.policies import Policy
from omni_proxy.routing.policies.sticky import Sticky
from omni_proxy.routing.stored_responses import ResponseOwners, own_response_owners

# Two processes that both give up the same place find it free again at their next choice; that this
# happens three times in a row is less likely than one in a million.
CHOICES: Final = 3


class Balancer:
    """Chooses the worker of each attempt by the policy in force."""

    def __init__(
        self, fleet: Fleet, policy: Policy, voices: VoiceRegistry, recorders: Recorders
    ) -> None:
        self.policy = policy
        self.affinity_keys = AffinityKeyReader(())
        self.voices = voices
        self.response_owners: ResponseOwners = own_response_owners()
        self._fleet = fleet
        self._recorders = recorders

    def eligible(self, need: Requirements) -> list[Worker]:
        return list(eligible_workers(self._fleet, need, self.voices.owner))

    def held_for_update(self, need: Requirements) -> list[Worker]:
        held = self.held_worker(need)
        if held is not None:
            return [held.worker]
        return list(workers_held_for_update(self._fleet, need, self.voices.owner))

    def held_worker(self, need: Requirements) -> Worker | None:
        """The worker that the request's session waits for; None where it does not wait."""
        return self.policy.held_worker(need) if isinstance(self.policy, Sticky) else None

    def acquire(self, exchange: Exchange, tried: Collection[Worker] = ()) -> Worker:
        """Begin an attempt at the worker that this returns. Raises HttpError: none can take it."""
        need, fleet = exchange.requirements, self._fleet
        assert need is not None
        worker = pick_worker(fleet, need, self.policy, tried, self.voices.owner)
        worker.in_flight += 1
        if fleet.has_ranks:
            worker = self._take_rank(exchange, need, tried, worker)
        elif fleet.has_inflight_limits and fleet.is_over_limit(worker):
            worker = self._acquire_another(need, tried, worker)
        exchange.worker = worker
        exchange.version = worker.version
        if self._recorders.route_log is not None:
            state = worker.health.state.value
            exchange.worker_seen = (state, worker.disabled, worker.routable)
        exchange.attempts += 1
        if worker.in_flight > worker.peak_in_flight:
            worker.peak_in_flight = worker.in_flight
        if worker.health.breaker_tripped:
            exchange.half_open_id = fleet.begin_half_open(worker)
        route = exchange.route
        if route is not None:
            worker.counts[route.counter_index] += 1
        return worker

    def _take_rank(
        self, exchange: Exchange, need: Requirements, tried: Collection[Worker], target: Worker
    ) -> Worker:
        """The worker of `target`, which may be a rank; `target` is counted already."""
        count_at_worker(target, 1)
        if self._fleet.has_inflight_limits and self._fleet.is_over_limit(target):
            target = self._acquire_another(need, tried, target)
        return note_rank(exchange, target)

    def _acquire_another(
        self, need: Requirements, tried: Collection[Worker], full: Worker
    ) -> Worker:
        """Another process has taken the last place of `full` in the same moment."""
        fleet = self._fleet
        full.in_flight -= 1
        count_at_worker(full, -1)
        for _ in range(CHOICES - 1):
            worker = pick_worker(fleet, need, self.policy, tried, self.voices.owner)
            worker.in_flight += 1
            count_at_worker(worker, 1)
            if not fleet.is_over_limit(worker):
                return worker
            worker.in_flight -= 1
            count_at_worker(worker, -1)
        raise no_worker_error(fleet, need, self.voices.owner)

    def release(self, exchange: Exchange, worker: Worker, result: int) -> None:
        """The attempt at `worker`, the present one, is over: SUCCEEDED or FAILED. The caller serves
        the admission queue."""
        exchange.worker, exchange.last_worker = None, worker
        worker.in_flight -= 1
        if exchange.rank is not None:
            release_rank(exchange, exchange.rank, result)
        if exchange.half_open_id:
            self._fleet.end_half_open(worker, exchange.half_open_id)
            exchange.half_open_id = 0
        route = exchange.route
        if route is not None:
            worker.counts[route.counter_index + result] += 1


def count_at_worker(target: Worker, requests: int) -> None:
    """Count requests in flight at the worker of a rank, where they were counted at the rank."""
    if isinstance(target, DpRank):
        target.worker.in_flight += requests


def note_rank(exchange: Exchange, target: Worker) -> Worker:
    """The worker of the attempt; if a rank was picked, the exchange holds it from now on."""
    if not isinstance(target, DpRank):
        return target
    exchange.rank = target
    target.peak_in_flight = max(target.peak_in_flight, target.in_flight)
    if exchange.route is not None:
        target.counts[exchange.route.counter_index] += 1
    return target.worker


def release_rank(exchange: Exchange, rank: DpRank, result: int) -> None:
    """The attempt is over, and was released at the rank's worker."""
    exchange.rank, exchange.last_rank = None, rank
    rank.in_flight -= 1
    if exchange.route is not None:
        rank.counts[exchange.route.counter_index + result] += 1


def report_failure(
    fleet: Fleet, exchange: Exchange, worker: Worker, error: str, status: int | None = None
) -> None:
    """Let outlier ejection know of a failure that was the worker's."""
    fleet.observe_request_failure(
        worker, status=status, error=error, at=datetime.now(UTC), half_open_id=exchange.half_open_id
    )
