"""Picks the workers of a request in a fleet with prefill and decode workers.

    decode worker     by decode_policy, among those that a prefill worker pairs with
    uncached < bound  the decode worker computes the prompt itself     (min_uncached_tokens)
    prefill worker    by prefill_policy, among those that pair with the decode worker
    no pair           only a decode worker (fallback = "decode"), else a regular worker

Invariants: both workers of a placement pair (`partners`); every picked worker is routable, capable
and below its limit; untried workers are preferred; a placement exists if and only if `is_eligible`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import msgspec

from omni_proxy.config.fields import Role
from omni_proxy.config.schema import DisaggregationConfig
from omni_proxy.fleet.engine_load import EngineLoads
from omni_proxy.fleet.registry import CANDIDATE_LISTS, Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.partners import Pools, alone, no_pair_error, pair_up, pinned
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import (
    eligible_workers,
    filter_by_version,
    has_room,
    pick_worker,
    untried,
)
from omni_proxy.routing.policies import Policy
from omni_proxy.routing.routes import NO_LEGS, UNPINNED, Legs
from omni_proxy.wire.errors import HttpError


class PoolChoice(Protocol):
    """The part of `PoolPolicies` that picking needs; also implemented by previews."""

    @property
    def rules(self) -> DisaggregationConfig: ...

    def of(self, role: Role) -> Policy: ...

    def uncached_tokens(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> Callable[[Worker], int | None]: ...

    def record_cached(self, worker: Worker, requirements: Requirements) -> None: ...


class Policies(msgspec.Struct, frozen=True, gc=False):
    """`regular`: the policy of regular workers. `pools`: those of the prefill and decode pools."""

    regular: Policy
    pools: PoolChoice


class Placement(msgspec.Struct, frozen=True, gc=False):
    """`worker` answers the client: a decode worker, or a regular one. `prefill`: the worker of the
    other leg; None if `worker` computes the prompt itself, with the `reason`: "" for a regular
    worker, else "cached", "fallback" or "no_model"."""

    worker: Worker
    prefill: Worker | None = None
    reason: str = ""


class _LastPools(msgspec.Struct, frozen=True, gc=False):
    """The pools of the last request: the next one usually has the same. `revision`: of the fleet,
    in which no worker has a limit."""

    revision: int
    model: str | None
    mask: int
    legs: Legs
    pools: Pools


_NO_POOLS: Final = _LastPools(-1, None, 0, NO_LEGS, Pools((), (), (), {}))


class Pairing:
    """Finds the pools of a request; results that don't depend on load are cached until the fleet
    changes."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._revision = -1
        self._last = _NO_POOLS
        self._kept: dict[tuple[int, int, Legs], Pools] = {}

    def cached_pools(self, need: Requirements) -> Pools | None:
        """The pools of the last request, if they are also those of this one."""
        last = self._last
        if (
            last.revision == self.fleet.revision
            and need.model == last.model
            and need.mask == last.mask
            and need.legs is last.legs
            and need.pinning is UNPINNED
            and need.version_constraint is None
            and need.dp_rank < 0
        ):
            return last.pools
        return None

    def pools(self, need: Requirements) -> Pools:
        """The pools that can take the request now.

        Raises HttpError 404 if it names an unknown worker.
        """
        cached = self.cached_pools(need)
        if cached is not None:
            return cached
        fleet = self.fleet
        is_free = need.pinning is UNPINNED and need.version_constraint is None and need.dp_rank < 0
        prefills: Sequence[Worker] = fleet.pool("prefill", need.model, need.mask)
        decodes: Sequence[Worker] = fleet.pool("decode", need.model, need.mask)
        if is_free:
            pools = self._pools(prefills, decodes, need.legs)
            if not fleet.has_inflight_limits:
                self._last = _LastPools(fleet.revision, need.model, need.mask, need.legs, pools)
                return pools
        prefills, decodes = pinned(fleet, need, prefills, decodes)
        if need.version_constraint is not None:
            prefills = filter_by_version(need, prefills)
            decodes = filter_by_version(need, decodes)
        if fleet.has_inflight_limits:
            prefills = [worker for worker in prefills if has_room(worker)]
            decodes = [worker for worker in decodes if has_room(worker)]
        return pair_up(prefills, decodes, need.legs)

    def _pools(self, prefills: Sequence[Worker], decodes: Sequence[Worker], legs: Legs) -> Pools:
        if self._revision != self.fleet.revision or len(self._kept) >= CANDIDATE_LISTS:
            self._kept.clear()
            self._revision = self.fleet.revision
        key = (id(prefills), id(decodes), legs)
        pools = self._kept.get(key)
        if pools is None:  # `Pools` refers to both lists, so their ids are not reused
            pools = self._kept[key] = pair_up(prefills, decodes, legs)
        return pools


def pick_from_last_pools(
    pairing: Pairing, need: Requirements, policies: PoolPolicies
) -> tuple[Worker, Worker] | None:
    """The decode and the prefill worker that `pick_placement` picks for a first attempt, in fewer
    steps; None for requests that need `pick_placement`."""
    pools, built = pairing.cached_pools(need), policies.built
    if (
        pools is None
        or not pools.paired
        or pairing.fleet.loads.overloaded
        or policies.rules.min_uncached_tokens
        or len(built) < 2
    ):
        return None
    decode = built["decode"].pick(pools.paired, need)
    return decode, built["prefill"].pick(pools.partners[decode], need)


def pick_placement(
    pairing: Pairing,
    need: Requirements,
    policies: Policies,
    tried: Collection[Worker] = (),
    owner: str = "",
) -> Placement:
    """The workers for this attempt; in each pool an untried one if there is any.

    `owner` as for `pick_worker`. Raises HttpError 503 with the reason why there are none.
    """
    fleet = pairing.fleet
    if need.legs is not NO_LEGS:
        preference = _Preference(tried, fleet.loads)
        placement = _from_pools(pairing.pools(need), need, policies.pools, preference)
        if placement is not None:
            return placement
    try:
        return Placement(pick_worker(fleet, need, policies.regular, tried, owner))
    except HttpError as error:
        pools = need.legs is not NO_LEGS and fleet.has_pools
        if not pools or error.code not in ("no_regular_worker", "model_not_found"):
            raise
        raise no_pair_error(fleet, need, owner) from None


class _Preference(msgspec.Struct, frozen=True, gc=False):
    """`tried`: workers of earlier attempts. `loads`: used to avoid overloaded engines."""

    tried: Collection[Worker]
    loads: EngineLoads

    def among(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """The untried workers, or else all; of these, those that are not overloaded, or else all.
        If none is left out, the same list object, which policies recognize."""
        if self.tried:
            workers = untried(workers, self.tried) or workers
        return self.loads.below_bounds(workers) if self.loads.overloaded else workers


def _from_pools(
    pools: Pools, need: Requirements, policies: PoolChoice, preference: _Preference
) -> Placement | None:
    """None if a regular worker has to take it."""
    legs, decodes, tried = need.legs, pools.paired, preference.tried
    lone: Sequence[Worker] | None = None
    if tried and decodes:
        partners = pools.partners
        decodes = [
            w for w in decodes if any(prefill.worker not in tried for prefill in partners[w])
        ]
        if not decodes:
            lone = _alone(pools, legs, policies)
            decodes = () if lone else pools.paired
    if decodes:
        return _two_legs(pools, preference.among(decodes), need, policies, preference)
    lone = _alone(pools, legs, policies) if lone is None else lone
    if not lone:
        return None
    worker = policies.of("decode").pick(preference.among(lone), need)
    return Placement(worker, None, "no_model" if legs.no_model else "fallback")


def _two_legs(
    pools: Pools,
    decodes: Sequence[Worker],
    need: Requirements,
    policies: PoolChoice,
    preference: _Preference,
) -> Placement:
    bound = policies.rules.min_uncached_tokens
    # Must be computed before the pick, after which the prompt counts as cached there.
    uncached = policies.uncached_tokens(decodes, need) if bound else None
    decode = policies.of("decode").pick(decodes, need)
    if uncached is not None:
        tokens = uncached(decode) if decode.kv_connector in need.legs.alone else None
        policies.record_cached(decode, need)
        if tokens is not None and tokens < bound:
            return Placement(decode, None, "cached")
    prefill = policies.of("prefill").pick(preference.among(pools.partners[decode]), need)
    return Placement(decode, prefill)


def _alone(pools: Pools, legs: Legs, policies: PoolChoice) -> Sequence[Worker]:
    return alone(pools.decodes, legs, fallback=policies.rules.fallback == "decode")


def is_eligible(
    pairing: Pairing, need: Requirements, policies: PoolChoice, owner: str = ""
) -> bool:
    """Whether `pick_placement` would find workers now. Raises HttpError 404."""
    pools = pairing.pools(need)
    if pools.paired or _alone(pools, need.legs, policies):
        return True
    return bool(eligible_workers(pairing.fleet, need, owner))


def could_take(pairing: Pairing, need: Requirements, policies: PoolChoice) -> bool:
    """Whether there are workers for the request if limits are ignored. Raises HttpError 404."""
    fleet = pairing.fleet
    prefills, decodes = pinned(
        fleet,
        need,
        filter_by_version(need, fleet.pool("prefill", need.model, need.mask)),
        filter_by_version(need, fleet.pool("decode", need.model, need.mask)),
    )
    pools = pair_up(prefills, decodes, need.legs)
    if pools.paired or _alone(pools, need.legs, policies):
        return True
    return bool(filter_by_version(need, fleet.candidates(need.model, need.mask)))


def all_tried(
    pairing: Pairing,
    need: Requirements,
    policies: PoolChoice,
    tried: Collection[Worker],
    owner: str = "",
) -> bool:
    """Whether the next attempt could only use workers that were tried; False if no worker can take
    the request. Raises HttpError 404."""
    pools = pairing.pools(need)
    for decode in pools.paired:
        fresh = any(prefill.worker not in tried for prefill in pools.partners[decode])
        if fresh and decode.worker not in tried:
            return False
    lone = _alone(pools, need.legs, policies)
    if pools.paired and not lone:
        return True
    others = lone or eligible_workers(pairing.fleet, need, owner)
    return bool(others) and all(target.worker in tried for target in others)
