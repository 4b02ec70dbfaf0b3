"""Picks a worker: routable, capable, right model, below its limit, not tried yet; then the policy.

Also builds the error with the reason why no worker is eligible, and explains a pick: the reasons
for each worker, and the policy's choice. Invariant: `ineligibility_reasons` is empty for a worker
if and only if `pick_worker` can choose it, except for overloaded engines (`fleet.loads`). `explain`
must not change anything: it sends no request and leaves the policy's state unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from omni_proxy.config.fields import Role
from omni_proxy.fleet.cordon_reasons import (
    CATCHING_UP,
    CUT_OFF,
    PAUSED,
    UNCERTAIN,
    UNPROVEN,
    UPDATING,
    WEIGHT_CORDONS,
)
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker, capability_names
from omni_proxy.routing.inspect.requirements import ANY_RANK, Requirements
from omni_proxy.routing.pinning import candidates_of_rank, rank_error
from omni_proxy.routing.policies import Policy
from omni_proxy.routing.routes import NAMED, UNPINNED, VOICE_OWNER
from omni_proxy.wire.errors import HttpError


def has_room(target: Worker) -> bool:
    """Whether the target is below its limit; for a rank, its worker must be, too."""
    if not target.max_inflight:
        return True
    worker = target.worker
    return target.in_flight < target.inflight_bound and worker.in_flight < worker.inflight_bound


def eligible_workers(fleet: Fleet, requirements: Requirements, owner: str = "") -> Sequence[Worker]:
    """The workers that could take the request now, in registration order.

    Raises HttpError 404 if the request names an unknown worker.
    """
    return _narrowed(
        fleet, requirements, fleet.candidates(requirements.model, requirements.mask), owner
    )


def _narrowed(
    fleet: Fleet, requirements: Requirements, candidates: Sequence[Worker], owner: str
) -> Sequence[Worker]:
    if requirements.version_constraint is not None:
        candidates = filter_by_version(requirements, candidates)
    if requirements.pinning is not UNPINNED:
        candidates = _placed(fleet, requirements, candidates, owner)
    if fleet.has_inflight_limits:
        candidates = [worker for worker in candidates if has_room(worker)]
    if requirements.dp_rank != ANY_RANK:
        candidates = candidates_of_rank(candidates, requirements.dp_rank)
    return candidates


def pick_worker(
    fleet: Fleet,
    requirements: Requirements,
    policy: Policy,
    tried: Collection[Worker] = (),
    owner: str = "",
) -> Worker:
    """The worker for this attempt; one that was not tried yet if there is any.

    `owner`: URL of the worker that keeps the voices, or "".
    Raises HttpError 503 with the reason why no worker is eligible.
    """
    model, mask = requirements.model, requirements.mask
    # The usual case without a call: a known model that some worker can serve.
    cached = fleet.candidate_cache.get((model, mask))
    candidates: Sequence[Worker] = cached or fleet.candidates(model, mask)
    if (
        fleet.has_inflight_limits
        or requirements.pinning is not UNPINNED
        or requirements.version_constraint is not None
        or requirements.dp_rank != ANY_RANK
    ):  # checked here to save the call in the usual case
        candidates = _narrowed(fleet, requirements, candidates, owner)
    if tried and len(candidates) > 1:
        candidates = untried(candidates, tried) or candidates
    if not candidates:
        raise no_worker_error(fleet, requirements, owner)
    if fleet.loads.overloaded:
        candidates = fleet.loads.below_bounds(candidates)
    return policy.pick(candidates, requirements)


def untried(candidates: Sequence[Worker], tried: Collection[Worker]) -> Sequence[Worker]:
    """Targets that were not tried, preferably of workers of which no rank was tried."""
    untried = [target for target in candidates if target not in tried]
    return [target for target in untried if target.worker not in tried] or untried


def filter_by_version(requirements: Requirements, workers: Sequence[Worker]) -> Sequence[Worker]:
    """The workers whose weight version the request accepts."""
    constraint = requirements.version_constraint
    return (
        workers
        if constraint is None
        else [w for w in workers if constraint.is_met_by(w.weight_version)]
    )


def _placed(
    fleet: Fleet, requirements: Requirements, candidates: Sequence[Worker], owner: str
) -> Sequence[Worker]:
    if requirements.pinning is NAMED:
        pinned = fleet.get(requirements.named_worker)
        if pinned is None:
            raise HttpError(404, "unknown route worker", "unknown_worker")
        return [target for target in candidates if target.worker is pinned]
    if owner:
        return [target for target in candidates if target.worker.url == owner]
    # Before the first upload: the first routable worker that is able to keep voices.
    return [target for target in candidates if "audio_input" in target.capabilities][:1]


def ineligibility_reasons(
    fleet: Fleet,
    worker: Worker,
    requirements: Requirements,
    owner: str = "",
    role: Role = "regular",
) -> list[str]:
    """Why this worker is not eligible, the most important reason first; empty if it is. `role`: the
    role that the request needs."""
    reasons = []
    if worker.role != role:
        serves = "serves" if worker.role == "regular" else f"serves only the {worker.role} leg of"
        what = "whole requests, not their legs" if worker.role == "regular" else "requests"
        reasons.append(f"{serves} {what}")
    reasons += _unroutable_reasons(worker)
    missing = capability_names(requirements.mask & ~worker.mask)
    if missing:
        reasons.append("lacks " + ", ".join(missing))
    if (
        requirements.model
        and not worker.serves(requirements.model)
        and _model_counts(fleet, requirements, role)
    ):
        serves = f"serves the model {worker.model!r}" if worker.model else "names no model"
        reasons.append(f"{serves}, not {requirements.model!r}")
    if (
        requirements.version_constraint is not None
        and not requirements.version_constraint.is_met_by(worker.weight_version)
    ):
        reasons.append(requirements.version_constraint.reason_against(worker.weight_version))
    if not has_room(worker):
        full = worker if worker.in_flight >= worker.inflight_bound else worker.worker
        reasons.append(_full_reason(full))
    if requirements.pinning is NAMED and fleet.get(requirements.named_worker) is not worker.worker:
        reasons.append("is not the worker that the request names")
    if requirements.dp_rank != ANY_RANK and not candidates_of_rank([worker], requirements.dp_rank):
        reasons.append(f"is not data-parallel rank {requirements.dp_rank}")
    if requirements.pinning is VOICE_OWNER:
        reasons += _reasons_against_voice_owner(fleet, worker, requirements, owner)
    return reasons


def _full_reason(worker: Worker) -> str:
    reason = f"full: {worker.in_flight} of {worker.max_inflight} in flight"
    if worker.in_flight < worker.max_inflight:
        return f"{reason}; the rest of its bound is for other proxies"
    return reason


def _unroutable_reasons(worker: Worker) -> list[str]:
    """Why the worker is out of rotation for any request; empty if it is routable."""
    reasons = []
    if worker.disabled:
        reasons.append("disabled")
    state = worker.health.state
    if state is not Health.HEALTHY:
        error = worker.health.last_error
        word = "not checked yet" if state is Health.UNKNOWN and not error else state.value
        reasons.append(word + (f" ({error})" if error else ""))
    elif worker.health.half_open_id:
        reasons.append("half-open: one request at a time until one succeeds")
    return reasons + [f"held: {hold}" for hold in sorted(worker.cordon_reasons)]


def _reasons_against_voice_owner(
    fleet: Fleet, worker: Worker, requirements: Requirements, owner: str
) -> list[str]:
    if owner:
        return [] if worker.worker.url == owner else ["does not keep the uploaded voices"]
    if "audio_input" not in worker.capabilities:
        return ["lacks audio_input, required for keeping voices"]
    candidates = filter_by_version(
        requirements, fleet.candidates(requirements.model, requirements.mask)
    )
    first = _placed(fleet, requirements, candidates, owner)
    return ["is not the first that could keep voices"] if first and worker not in first else []


def _model_counts(fleet: Fleet, requirements: Requirements, role: Role) -> bool:
    """Whether the model matters: only if an otherwise eligible worker names a model."""
    return any(
        worker.model
        for worker in fleet.workers
        if worker.role == role
        and worker.routable
        and worker.mask & requirements.mask == requirements.mask
    )


def changed(requirements: Requirements, **fields: object) -> Requirements:
    """A copy with these fields replaced."""
    values = {name: getattr(requirements, name) for name in Requirements.__match_args__}
    return Requirements(**{**values, **fields})


def no_worker_error(
    fleet: Fleet, requirements: Requirements, owner: str = "", role: Role = "regular"
) -> HttpError:
    """The 503 for a request that no worker can take, with the first step that leaves no worker; a
    400 if only the rank that the request names can't take it."""
    if requirements.dp_rank != ANY_RANK and role == "regular":
        others = eligible_workers(fleet, changed(requirements, dp_rank=ANY_RANK), owner)
        if others:
            return rank_error(others, fleet.workers, requirements.dp_rank)
    held_workers = workers_held_for_update(fleet, requirements, owner, role)
    code, message = (
        _by_weights(held_workers)
        if held_workers
        else _first_cause(fleet, requirements, owner, role)
    )
    return unavailable(code, message if role == "regular" else f"for {role}: {message}")


def unavailable(code: str, message: str) -> HttpError:
    """The 503 for a request that no worker can take now."""
    error = HttpError(503, f"no eligible upstream: {message}", code)
    return error.with_headers(("retry-after", "1"))


def workers_held_for_update(
    fleet: Fleet, requirements: Requirements, owner: str = "", role: Role = "regular"
) -> list[Worker]:
    """Workers that are ineligible only because of a weight operation; [] if another worker is
    eligible, or the cause is different."""
    remaining = _addressed(fleet, requirements, owner)
    for code, _, narrow in _steps(requirements, role):
        if code == "all_held":
            break
        remaining = narrow(remaining)
    well = [worker for worker in remaining if worker.health.state is Health.HEALTHY] or remaining
    return (
        well if all(w.cordon_reasons and w.cordon_reasons <= WEIGHT_CORDONS for w in well) else []
    )


def _addressed(fleet: Fleet, requirements: Requirements, owner: str) -> list[Worker]:
    """The workers that the request's pinning allows: one if it names a worker or a stored voice."""
    if requirements.pinning is NAMED:
        pinned = fleet.get(requirements.named_worker)
        return [pinned] if pinned else []
    if requirements.pinning is VOICE_OWNER:
        if owner:
            return [worker for worker in fleet.workers if worker.url == owner]
        return [worker for worker in fleet.workers if "audio_input" in worker.capabilities]
    return fleet.workers


def _by_weights(held_workers: Iterable[Worker]) -> tuple[str, str]:
    """Code and message; the code is that of the operation likely to end first."""
    holds = {hold for worker in held_workers for hold in worker.cordon_reasons}
    text = " or ".join(text for hold, text in _HELD_WORDS.items() if hold in holds)
    message = f"every worker that could take it is {text}"
    if UPDATING in holds:
        return "weights_updating", message
    if PAUSED in holds:
        return "paused", message
    return "weights_uncertain", message


def _first_cause(
    fleet: Fleet, requirements: Requirements, owner: str, role: Role
) -> tuple[str, str]:
    """Narrow the fleet as the pick does, and name the step that leaves no worker."""
    remaining = fleet.workers
    if not remaining:
        return "no_workers", "no worker is registered"
    for code, message, narrow in _steps(requirements, role):
        passed = narrow(remaining)
        if not passed:
            return code, message(remaining)
        remaining = passed
    if requirements.pinning is VOICE_OWNER:
        shown_owner = owner or "none has speech and audio_input"
        return "voice_owner_unavailable", f"the worker that keeps the voices is out ({shown_owner})"
    if requirements.pinning is NAMED:
        return "worker_unavailable", f"the worker {requirements.named_worker} is not routable"
    if requirements.model and not any(w.serves(requirements.model) for w in remaining):
        return "model_not_found", f"no routable worker serves the model {requirements.model!r}"
    # Only this step's result can change between the pick and here, by other requests in flight.
    return "all_full", "every eligible worker was at its limit a moment ago"


_HELD_WORDS = {
    UPDATING: "being updated",
    PAUSED: "paused by a trainer",
    UNCERTAIN: "uncertain since a weight update",
    CATCHING_UP: "being brought up to the version of the others",
    UNPROVEN: "being queried for its weight version",
    CUT_OFF: "not known to have its weights while the store of the cluster is lost",
}
_NO_SUCH_ROLE: dict[Role, str] = {
    "regular": "no_regular_worker",
    "prefill": "no_prefill_worker",
    "decode": "no_decode_worker",
}
_Workers = list[Worker]
_Step = tuple[str, Callable[[_Workers], str], Callable[[_Workers], _Workers]]


def _of_model(workers: _Workers, model: str | None) -> _Workers:
    """Workers that serve the model, or, if none does, workers that name no model."""
    if not model:
        return workers
    return [w for w in workers if w.serves(model)] or [w for w in workers if w.model is None]


def _steps(requirements: Requirements, role: Role) -> Iterator[_Step]:
    yield (
        _NO_SUCH_ROLE[role],
        lambda _: (
            "every worker serves only the prefill or the decode leg of requests"
            if role == "regular"
            else f"no worker has the role {role}"
        ),
        lambda remaining: [worker for worker in remaining if worker.role == role],
    )
    yield (
        "no_capable_worker",
        lambda remaining: "no worker can do " + _missing(remaining, requirements),
        lambda remaining: [
            worker for worker in remaining if worker.mask & requirements.mask == requirements.mask
        ],
    )
    yield (
        "model_not_found",
        lambda _: f"no worker serves the model {requirements.model!r}",
        lambda remaining: _of_model(remaining, requirements.model),
    )
    yield (
        "all_disabled",
        lambda remaining: f"all {len(remaining)} workers that could take it are disabled",
        lambda remaining: [worker for worker in remaining if not worker.disabled],
    )
    yield (
        "weight_version_unavailable",
        lambda _: f"no worker that could take it has weights {requirements.version_constraint}",
        lambda remaining: list(filter_by_version(requirements, remaining)),
    )
    yield (
        "all_held",
        lambda remaining: (
            "every worker that could take it is held: "
            + _list_reasons(w.cordon_reasons for w in remaining)
        ),
        lambda remaining: [worker for worker in remaining if not worker.cordon_reasons],
    )
    yield (
        "none_healthy",
        lambda remaining: (
            "no worker that could take it is healthy: "
            + _list_reasons([_state_reason(worker)] for worker in remaining)
        ),
        lambda remaining: [worker for worker in remaining if worker.routable],
    )
    yield (
        "all_full",
        lambda _: "every worker that could take it is at its max_inflight",
        lambda remaining: [worker for worker in remaining if has_room(worker)],
    )


def _state_reason(worker: Worker) -> str:
    return "half-open" if worker.health.is_half_open else worker.health.state.value


def _missing(workers: list[Worker], requirements: Requirements) -> str:
    """The required capabilities that no worker has; if each is there, "all of ..."."""
    had = 0
    for worker in workers:
        had |= worker.mask
    lacking = requirements.mask & ~had
    return ", ".join(capability_names(lacking)) or "all of " + ", ".join(requirements.capabilities)


def _list_reasons(text: Iterable[Iterable[str]]) -> str:
    return ", ".join(sorted({item for group in text for item in group}))


class Preview(Policy):
    """Passed to `pick_worker` as the policy: previews instead of picking, and keeps the reason."""

    __slots__ = ("_policy", "details", "name", "reason")

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.reason = ""
        self.details: Mapping[str, object] = {}
        self._policy = policy

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        return self.preview_pick(candidates, requirements)[0]

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        worker, self.reason = self._policy.preview_pick(candidates, requirements)
        self.details = self._policy.explain_pick(candidates, requirements)
        return worker, self.reason


@dataclass(frozen=True, slots=True)
class Explanation:
    """Routing of a request: reasons for each worker, and either a pick or an error."""

    reasons: Sequence[tuple[Worker, list[str]]]  # why it can't take the request; empty if it can
    pick: Worker | None = None
    reason: str = ""  # for the pick, from the policy
    details: Mapping[str, object] = field(default_factory=dict)  # `explain_pick` of the policy
    error: HttpError | None = None


Verdicts: TypeAlias = list[tuple[Worker, list[str]]]


def with_veto(fleet: Fleet, verdicts: Verdicts) -> Verdicts:
    """The verdicts, with a reason for each worker that is left out because its engine is
    overloaded."""
    against = dict(fleet.loads.reasons([target for target, reasons in verdicts if not reasons]))
    return [
        (target, [against[target]] if target in against else reasons)
        for target, reasons in verdicts
    ]


def explain(
    fleet: Fleet, requirements: Requirements, policy: Policy, owner: str = ""
) -> Explanation:
    """Reasons are in registration order. Changes no state."""
    reasons = [
        (target, ineligibility_reasons(fleet, target, requirements, owner))
        for worker in fleet.workers
        for target in worker.dp_ranks or (worker,)
    ]
    reasons = with_veto(fleet, reasons)
    preview = Preview(policy)
    try:
        picked = pick_worker(fleet, requirements, preview, owner=owner)
    except HttpError as error:
        return Explanation(reasons, error=error)
    return Explanation(reasons, picked, preview.reason, preview.details)
