"""The 503 for a request that needs a prefill and a decode worker, if there is no pair.

Invariant: codes and texts are those of `routing.pick` if a pool has no worker for the request; new
ones only explain why no two workers pair. Must not change any state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from omni_proxy.config.fields import Role
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.partners import pinned
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
from omni_proxy.routing.routes import NAMED, UNPINNED
from omni_proxy.wire.errors import HttpError


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
