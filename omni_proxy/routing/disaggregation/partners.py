"""Rules for pairs of prefill and decode workers, and for decode workers that serve whole requests;
and the 503 for a request for which there is no pair.

Two workers pair if they have the same KV connector, model and weights: a prompt that was computed
by one version is never continued by another. Codes and texts of errors are those of `routing.pick`
if a pool has no worker for the request; new ones only explain why no two workers pair. Must not
pick workers, which `pairing` does, nor change any state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from omni_proxy.config.fields import Role
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import ANY_RANK, Requirements
from omni_proxy.routing.pick import (
    changed,
    filter_by_version,
    has_room,
    no_worker_error,
    unavailable,
    workers_held_for_update,
)
from omni_proxy.routing.pinning import candidates_of_rank, rank_error
from omni_proxy.routing.routes import BOTH_ENGINES, NAMED, UNPINNED, Legs
from omni_proxy.wire.errors import HttpError


def may_pair(prefill: Worker, decode: Worker) -> bool:
    return (
        prefill.kv_connector == decode.kv_connector
        and prefill.model == decode.model
        and same_weights(prefill.weight_version, decode.weight_version)
    )


def same_weights(one: WeightVersion, other: WeightVersion) -> bool:
    """An unknown label matches any label; epochs, which the proxy counts itself, must be equal."""
    if one.epoch != other.epoch:
        return False
    return one.label == other.label or one.label is None or other.label is None


@dataclass(slots=True)
class Pools:
    """The workers of both pools that a request could use. `paired`: decode workers that have a
    partner; `partners`: their prefill workers. Lists are shared and must not be changed."""

    prefills: Sequence[Worker]
    decodes: Sequence[Worker]
    paired: Sequence[Worker]
    partners: dict[Worker, Sequence[Worker]]


def pair_up(prefills: Sequence[Worker], decodes: Sequence[Worker], legs: Legs) -> Pools:
    """Decode workers with equal properties share one list of partners, so that policies recognize
    it by identity."""
    lists: dict[tuple[str, str | None, WeightVersion], Sequence[Worker]] = {}
    partners: dict[Worker, Sequence[Worker]] = {}
    for decode in decodes:
        key = (decode.kv_connector, decode.model, decode.weight_version)
        partner_list = lists.get(key)
        if partner_list is None:
            fits = decode.kv_connector in legs.connectors
            partner_list = [prefill for prefill in prefills if fits and may_pair(prefill, decode)]
            lists[key] = partner_list
        if partner_list:
            partners[decode] = partner_list
    paired = decodes if len(partners) == len(decodes) else [w for w in decodes if w in partners]
    return Pools(prefills, decodes, paired, partners)


def pinned(
    fleet: Fleet, need: Requirements, prefills: Sequence[Worker], decodes: Sequence[Worker]
) -> tuple[Sequence[Worker], Sequence[Worker]]:
    """Both pools without workers that the request's pinning excludes: it may name a worker of
    either pool, and a data-parallel rank, which applies to the decode worker. Raises HttpError 404
    for an unknown worker."""
    if need.dp_rank != ANY_RANK:
        decodes = candidates_of_rank(decodes, need.dp_rank)
    if need.pinning is UNPINNED:
        return prefills, decodes
    worker = fleet.get(need.named_worker) if need.pinning is NAMED else None
    if need.pinning is NAMED and worker is None:
        raise HttpError(404, "unknown route worker", "unknown_worker")
    if worker is None or worker.role == "regular":
        return [], []
    if worker.role == "prefill":
        return [target for target in prefills if target.worker is worker], decodes
    return prefills, [target for target in decodes if target.worker is worker]


def alone(decodes: Sequence[Worker], legs: Legs, *, fallback: bool) -> Sequence[Worker]:
    """The decode workers that may serve the request without a prefill worker."""
    if legs.no_model:
        return decodes
    return [worker for worker in decodes if worker.kv_connector in legs.alone] if fallback else []


def can_serve(workers: Iterable[Worker], *, fallback: bool, same_version: bool = True) -> bool:
    """Whether these workers can serve requests: with a regular worker, a pair, or a decode worker
    that may serve whole requests. `same_version`: only workers with the same weights pair."""
    pools: dict[str, list[Worker]] = {"prefill": [], "decode": []}
    for worker in workers:
        if worker.role == "regular":
            return True
        pools[worker.role].append(worker)
    if alone(pools["decode"], BOTH_ENGINES, fallback=fallback):
        return True
    return any(
        prefill.kv_connector == decode.kv_connector
        and prefill.model == decode.model
        and (not same_version or same_weights(prefill.weight_version, decode.weight_version))
        for decode in pools["decode"]
        for prefill in pools["prefill"]
    )


def no_pair_error(fleet: Fleet, need: Requirements, owner: str = "") -> HttpError:
    """The error with the first reason found: in the decode pool, in the prefill pool, or why no two
    workers pair. A 400 if workers have room, but not at the rank that the request names.

    Raises HttpError 404.
    """
    if need.dp_rank != ANY_RANK:
        any_rank = changed(need, dp_rank=ANY_RANK)
        others = [decode for decode in _pools(fleet, any_rank)[1] if has_room(decode)]
        if others and not candidates_of_rank(others, need.dp_rank):
            return rank_error(others, fleet.workers, need.dp_rank)
    prefills, decodes = _pools(fleet, need)
    decodes = [worker for worker in decodes if has_room(worker)]
    if not decodes:
        return no_worker_error(fleet, of_leg(fleet, need, "decode"), owner, "decode")
    split = [worker for worker in decodes if worker.kv_connector in need.legs.connectors]
    if not split:
        names = _names(worker.kv_connector for worker in decodes)
        return unavailable(
            "no_regular_worker",
            f"with kv_connector {names} this route is not served in two legs, and there is no "
            "regular worker",
        )
    prefills = [worker for worker in prefills if has_room(worker)]
    if not prefills:
        return no_worker_error(fleet, of_leg(fleet, need, "prefill"), owner, "prefill")
    return _no_match_error(prefills, split)


def _pools(fleet: Fleet, need: Requirements) -> tuple[Sequence[Worker], Sequence[Worker]]:
    """Raises HttpError 404."""
    return pinned(
        fleet,
        need,
        filter_by_version(need, fleet.pool("prefill", need.model, need.mask)),
        filter_by_version(need, fleet.pool("decode", need.model, need.mask)),
    )


def held_for_update(fleet: Fleet, need: Requirements, owner: str = "") -> list[Worker]:
    """The workers held for an update: regular ones; if there are none, those of the decode pool,
    then those of the prefill pool."""
    return (
        workers_held_for_update(fleet, need, owner)
        or workers_held_for_update(fleet, of_leg(fleet, need, "decode"), owner, "decode")
        or workers_held_for_update(fleet, of_leg(fleet, need, "prefill"), owner, "prefill")
    )


def of_leg(fleet: Fleet, need: Requirements, role: Role) -> Requirements:
    """The request's requirements for this leg: pinning to a worker applies only to its own role."""
    worker = fleet.get(need.named_worker) if need.pinning is NAMED else None
    if worker is None or worker.role in (role, "regular"):
        return need
    return changed(need, pinning=UNPINNED, named_worker="")


def _no_match_error(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> HttpError:
    def differ(what: str, of: Callable[[Worker], object]) -> str:
        return (
            f"prefill workers have {what} {_names(map(of, prefills))}, decode workers "
            f"{_names(map(of, decodes))}"
        )

    alike = [(p, d) for p in prefills for d in decodes if p.kv_connector == d.kv_connector]
    if not alike:
        return unavailable("no_pair", differ("kv_connector", lambda worker: worker.kv_connector))
    if all(p.model != d.model for p, d in alike):
        return unavailable("no_pair", differ("the model", lambda worker: worker.model or "none"))
    return unavailable(
        "weight_versions_differ", differ("the weights", lambda worker: worker.weight_version)
    )


def _names(values: Iterable[object]) -> str:
    return ", ".join(sorted({str(value) for value in values}))
