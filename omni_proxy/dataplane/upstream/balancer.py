"""Acquires a worker for an attempt and releases it at its end: counts, half-open requests, bounds.

Invariant: a worker that was acquired is released exactly once, and no worker has more in flight
than its `max_inflight`, over all data-plane processes; likewise for a data-parallel rank, which is
counted with its worker. Nothing is awaited between the choice and the count. A prefill and a decode
worker are acquired together; each is released when its leg ends.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Final

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.exchange.exchange import Exchange, Recorders, TwoLegs
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import FAILED, Worker, WorkerLoad
from omni_proxy.routing.disaggregation.explanation import next_record, record_pick
from omni_proxy.routing.disaggregation.pairing import (
    Pairing,
    Placement,
    Policies,
    all_tried,
    could_take,
    is_eligible,
    pick_from_last_pools,
    pick_placement,
)
from omni_proxy.routing.disaggregation.partners import held_for_update, no_pair_error
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.affinity_key import AffinityKeyReader
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.model_aliases import (
    ModelAliases,
    all_targets_tried,
    any_target,
    choose_target,
)
from omni_proxy.routing.pick import (
    eligible_workers,
    filter_by_version,
    no_worker_error,
    pick_worker,
    workers_held_for_update,
)
from omni_proxy.routing.pinning import ResponseOwners, own_response_owners
from omni_proxy.routing.policies import Policy
from omni_proxy.routing.policies.sticky import Sticky
from omni_proxy.routing.routes import NO_LEGS
from omni_proxy.wire.errors import HttpError

# Two processes that take the same last slot both give it up, and then choose again. That this
# happens CHOICES times in a row is extremely unlikely.
CHOICES: Final = 3


class Balancer:
    """Chooses the worker of each attempt by the current policy."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        pool_policies: PoolPolicies,
        voices: VoiceRegistry,
        recorders: Recorders,
    ) -> None:
        self.policy = policy  # of regular workers; set by `use_policy`
        self.pool_policies = pool_policies
        self.affinity_keys = AffinityKeyReader(())
        self.aliases: ModelAliases | None = None  # None: none are configured
        # Roles, adapters or affinity keys affect the requirements of every request; aliases only
        # those of requests that name one; ranks affect none.
        self.always_special = False
        self.voices = voices
        self.response_owners: ResponseOwners = own_response_owners()
        # The first request after this time of the event loop's clock has its candidates recorded.
        self.record_from = inf
        self._fleet = fleet
        self._pairing = Pairing(fleet)
        self._policies = Policies(policy, pool_policies)
        self._recorders = recorders
        self.follow_fleet()  # it may have workers before its first change

    def use_policy(self, policy: Policy) -> None:
        """Replace the policy of regular workers."""
        self.policy = policy
        self.follow_fleet()

    def configure_aliases(self, config: Config) -> None:
        """Apply the aliases of `config`; unchanged ones keep their state."""
        before = self.aliases
        self.aliases = ModelAliases(config, before) if config.routing.models else None

    def follow_fleet(self) -> None:
        """Call it after each change of the fleet."""
        fleet = self._fleet
        self.always_special = (
            fleet.has_pools or fleet.has_adapters or self.policy.needs_affinity_key
        )

    def uses_pools(self, need: Requirements) -> bool:
        """Whether prefill and decode workers may take the request."""
        return self._fleet.has_pools and need.legs is not NO_LEGS

    @property
    def needs_affinity_key(self) -> bool:
        return self.policy.needs_affinity_key or (
            self._fleet.has_pools and self.pool_policies.needs_affinity_key
        )

    def is_eligible(self, need: Requirements) -> bool:
        """Whether `acquire` would find a worker now. Raises HttpError 404."""
        if need.alias is not None:
            return any_target(need, self.can_take)
        return self.can_take(need)

    def can_take(self, need: Requirements) -> bool:
        """As `is_eligible`, for `need.model` rather than an alias."""
        if self.uses_pools(need):
            return is_eligible(self._pairing, need, self.pool_policies, self.voices.owner)
        return bool(eligible_workers(self._fleet, need, self.voices.owner))

    def could_take(self, need: Requirements) -> bool:
        """Whether a worker could take it, possibly after waiting for a slot. Raises HttpError
        404."""
        if need.alias is not None:
            return any_target(need, self._could_take)
        return self._could_take(need)

    def _could_take(self, need: Requirements) -> bool:
        if self.uses_pools(need):
            return could_take(self._pairing, need, self.pool_policies)
        return bool(filter_by_version(need, self._fleet.candidates(need.model, need.mask)))

    def all_tried(self, need: Requirements, tried: Collection[Worker]) -> bool:
        """Whether an attempt has failed at every eligible worker; false if none is eligible. Raises
        HttpError 404."""
        if need.alias is not None:
            return all_targets_tried(need, self, tried)
        return self.has_tried_all(need, tried)

    def has_tried_all(self, need: Requirements, tried: Collection[Worker]) -> bool:
        """As `all_tried`, for `need.model` rather than an alias."""
        if self.uses_pools(need):
            return all_tried(self._pairing, need, self.pool_policies, tried, self.voices.owner)
        workers = eligible_workers(self._fleet, need, self.voices.owner)
        return bool(workers) and all(target.worker in tried for target in workers)

    def error_for(self, need: Requirements) -> HttpError:
        """Why no worker can take a request for `need.model` now."""
        error = no_worker_error(self._fleet, need, self.voices.owner)
        if self.uses_pools(need) and error.code in ("no_regular_worker", "model_not_found"):
            return no_pair_error(self._fleet, need, self.voices.owner)
        return error

    def held_for_update(self, need: Requirements) -> list[Worker]:
        target = self.held_worker(need)
        if target is not None:
            return [target.worker]
        if self.uses_pools(need):
            return held_for_update(self._fleet, need, self.voices.owner)
        return list(workers_held_for_update(self._fleet, need, self.voices.owner))

    def held_worker(self, need: Requirements) -> Worker | None:
        """The worker that the request's session waits for; None if it does not wait."""
        if self.uses_pools(need) and (worker := self.pool_policies.held_worker(need)) is not None:
            return worker
        return self.policy.held_worker(need) if isinstance(self.policy, Sticky) else None

    def acquire(self, exchange: Exchange, tried: Collection[Worker] = ()) -> Worker:
        """Choose a worker, count the attempt at it, and return it. If the request is served in two
        legs, the prefill worker is in `exchange.legs`. Raises HttpError if no worker can take
        it."""
        need, fleet = exchange.requirements, self._fleet
        assert need is not None
        if need.alias is not None and choose_target(need, self, tried):
            self._count_target(need.alias.split.name, need.model)
        if exchange.started_at >= self.record_from and not tried:
            self._record_candidates(exchange, need)
        if fleet.has_pools and need.legs is not NO_LEGS:
            worker = self._acquire_pair(exchange, need, tried)
        else:
            worker = pick_worker(fleet, need, self.policy, tried, self.voices.owner)
            worker.in_flight += 1  # inlined: count_at
            if not worker.is_plain:
                worker = self._settle(exchange, need, tried, worker)
        exchange.worker = worker
        exchange.weight_version = worker.weight_version
        if self._recorders.route_log is not None:
            state = worker.health.state.value
            exchange.worker_seen = (state, worker.disabled, worker.routable)
        exchange.attempts += 1
        load: WorkerLoad = worker  # typed for direct slot access in the native build
        if load.in_flight > load.peak_in_flight:
            load.peak_in_flight = load.in_flight
        if worker.health.breaker_tripped:
            exchange.half_open_id = fleet.begin_half_open(worker)
        if exchange.route is not None:
            counts, index = load.counts, exchange.route.counter_index
            counts[index] += 1
        return worker

    def _record_candidates(self, exchange: Exchange, need: Requirements) -> None:
        if exchange.candidates is not None:
            return  # a repeated pick, after waiting in the queue
        fleet, meters = self._fleet, self._recorders.meters
        self.record_from = next_record(self.record_from, exchange.started_at, fleet)
        policies = (self.policy, *self.pool_policies.built.values())
        # Without meters, finished requests are stored nowhere.
        if meters is not None and all(policy.explains_itself for policy in policies):
            owner = self.voices.owner
            exchange.candidates = record_pick(fleet, need, self.policy, self.pool_policies, owner)

    def _acquire_pair(
        self, exchange: Exchange, need: Requirements, tried: Collection[Worker]
    ) -> Worker:
        """Choose and count the workers of a request that may be served in two legs."""
        fleet = self._fleet
        if not (tried or fleet.has_ranks or fleet.has_inflight_limits):
            pair = pick_from_last_pools(self._pairing, need, self.pool_policies)
            if pair is not None:
                worker, prefill = pair
                # inlined: count_at
                worker.in_flight += 1
                prefill.in_flight += 1
                leg = self._begin_prefill(exchange, prefill)
                exchange.legs = TwoLegs(worker.kv_connector, leg)
                return worker
        return self._acquire_placement(exchange, need, tried)

    def _settle(
        self, exchange: Exchange, need: Requirements, tried: Collection[Worker], target: Worker
    ) -> Worker:
        """The worker of `target`, a rank or a worker with a bound, whose `in_flight` was already
        increased. If another process took its last slot, another one is chosen."""
        fleet = self._fleet
        if isinstance(target, DpRank):
            target.worker.in_flight += 1
        if fleet.has_inflight_limits and fleet.is_over_limit(target):
            target = self._acquire_another(need, tried, target)
        return note_rank(exchange, target)

    def _acquire_another(
        self, need: Requirements, tried: Collection[Worker], full: Worker
    ) -> Worker:
        """Choose again, because another process took the last slot of `full` concurrently."""
        fleet = self._fleet
        count_at(full, -1)
        for _ in range(CHOICES - 1):
            worker = pick_worker(fleet, need, self.policy, tried, self.voices.owner)
            count_at(worker, 1)
            if not fleet.is_over_limit(worker):
                return worker
            count_at(worker, -1)
        raise no_worker_error(fleet, need, self.voices.owner)

    def _acquire_placement(
        self, exchange: Exchange, need: Requirements, tried: Collection[Worker]
    ) -> Worker:
        """Choose a pair, count both workers and begin the prefill leg. Raises HttpError."""
        fleet = self._fleet
        policies = self._policies
        if policies.regular is not self.policy:
            policies = self._policies = Policies(self.policy, self.pool_policies)
        for _ in range(CHOICES):
            placement = pick_placement(self._pairing, need, policies, tried, self.voices.owner)
            if self._count(placement):
                break
        else:
            raise no_pair_error(fleet, need, self.voices.owner)
        target, exchange.legs = placement.worker, None
        connector = target.worker.kv_connector
        if placement.prefill is not None:
            leg = self._begin_prefill(exchange, placement.prefill)
            exchange.legs = TwoLegs(connector, leg)
        elif need.legs.connectors and target.worker.role == "decode":
            exchange.legs = TwoLegs(connector, None, placement.reason)
        return note_rank(exchange, target)

    def _begin_prefill(self, exchange: Exchange, target: Worker) -> Exchange:
        """The prefill leg as a separate exchange. `target`: a worker or a rank, already counted."""
        leg, exchange.spare_leg = exchange.spare_leg, None
        if leg is None:
            leg = Exchange(0.0, exchange.client)
        else:  # it succeeded, so only the fields that such a leg sets need a reset
            leg.started_at = leg.sent_at = leg.response_head_at = leg.ended_at = 0.0
            leg.status, leg.outcome = 0, ""
        leg.route, leg.requirements = exchange.route, exchange.requirements
        leg.trace = exchange.trace
        if isinstance(target, DpRank):
            worker = note_rank(leg, target)
        else:
            worker, leg.last_rank = target, None
        leg.worker = worker
        leg.weight_version = worker.weight_version
        leg.attempts = 1
        if worker.in_flight > worker.peak_in_flight:
            worker.peak_in_flight = worker.in_flight
        if leg.route is not None:
            worker.counts[leg.route.counter_index] += 1
        if worker.health.breaker_tripped:
            leg.half_open_id = self._fleet.begin_half_open(worker)
        return leg

    def _count(self, placement: Placement) -> bool:
        """Count both workers. False, counting none, if one has no free slot over all processes."""
        fleet, prefill, worker = self._fleet, placement.prefill, placement.worker
        targets = (worker,) if prefill is None else (worker, prefill)
        for target in targets:
            count_at(target, 1)
        if not fleet.has_inflight_limits or not any(map(fleet.is_over_limit, targets)):
            return True
        for target in targets:
            count_at(target, -1)
        return False

    def _count_target(self, alias: str, target: str | None) -> None:
        if self._recorders.meters is not None and target is not None:
            self._recorders.meters.count_target(alias, target)

    def release(self, exchange: Exchange, worker: Worker, result: int) -> None:
        """End the current attempt at `worker`. `result`: SUCCEEDED or FAILED. The caller must serve
        the admission queue."""
        exchange.worker, exchange.last_worker = None, worker
        worker.in_flight -= 1
        if exchange.rank is not None:
            release_rank(exchange, exchange.rank, result)
        if exchange.half_open_id:
            self._fleet.end_half_open(worker, exchange.half_open_id)
            exchange.half_open_id = 0
        if exchange.route is not None:
            counts, index = worker.counts, exchange.route.counter_index + result
            counts[index] += 1

    def release_prefill(self, legs: TwoLegs) -> None:
        """Release the prefill worker of a leg that has not begun; a leg that has begun releases its
        worker itself. The caller must serve the admission queue."""
        leg = legs.prefill
        if leg is not None and not legs.begun and leg.worker is not None:
            self.release(leg, leg.worker, FAILED)


def count_at(target: Worker, requests: int) -> None:
    """Add `requests` in flight at a worker, or at a rank and its worker."""
    target.in_flight += requests
    if isinstance(target, DpRank):
        target.worker.in_flight += requests


def note_rank(exchange: Exchange, target: Worker) -> Worker:
    """The worker of the attempt. If a rank was picked, it is counted and stored in `exchange`."""
    if not isinstance(target, DpRank):
        exchange.last_rank = None
        return target
    exchange.rank = target
    target.peak_in_flight = max(target.peak_in_flight, target.in_flight)
    if exchange.route is not None:
        target.counts[exchange.route.counter_index] += 1
    return target.worker


def release_rank(exchange: Exchange, rank: DpRank, result: int) -> None:
    """End the attempt at the rank, after it was released at the rank's worker."""
    exchange.rank, exchange.last_rank = None, rank
    rank.in_flight -= 1
    if exchange.route is not None:
        rank.counts[exchange.route.counter_index + result] += 1
