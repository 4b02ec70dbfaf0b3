"""Model aliases: requests for one name go to workers of other models, by weight.

Contract: an alias takes precedence over a model of the same name; its targets are models and
adapters, never aliases. For each attempt a target is chosen before the worker: by session, else by
weight; after a failed attempt the same target while it has an untried worker. A target without a
worker that could take the request now is chosen only if no target has one. From then on
`Requirements.model` is the target's model, and with `rewrite` it is spliced into the body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from omni_proxy.config.schema import Config, RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.affinity_key import (
    AffinityKeyReader,
    affinity_key_reader,
    affinity_keys_of,
)
from omni_proxy.routing.inspect.body_fields import adapters_of_body
from omni_proxy.routing.inspect.model_field import Parts, model_spans, with_model
from omni_proxy.routing.inspect.requirements import HeadFacts, Requirements
from omni_proxy.routing.routes import FORM, Route
from omni_proxy.routing.weighted_split import AliasRequirement, Split
from omni_proxy.wire.errors import HttpError

# These identify a client, which may be a gateway that sends all requests: a split by them would
# send everything to one target. Headers that the configuration lists are used without exception.
_CLIENT_HEADERS: Final = frozenset(("authorization", "x-forwarded-for"))
# Errors of targets without any worker. A target whose workers may return gives a better reason.
_ABSENT: Final = frozenset(
    ("no_workers", "no_regular_worker", "model_not_found", "no_capable_worker")
)


class ModelAliases:
    """The aliases of a configuration."""

    __slots__ = ("_session_keys", "splits")

    def __init__(self, config: Config, previous: ModelAliases | None = None) -> None:
        """Aliases with the same targets as in `previous` keep their state."""
        before = previous.splits if previous is not None else {}
        self.splits: Mapping[str, Split] = {
            entry.name: Split(entry, before.get(entry.name)) for entry in config.routing.models
        }
        self._session_keys = _session_keys_of(config)

    def find(self, model: str | None) -> Split | None:
        """The alias with this name, if any."""
        return self.splits.get(model) if model is not None else None

    def resolve(self, need: Requirements, lines: bytes, body: bytes) -> None:
        """Set `need.alias` if the request names an alias. `lines`: the lines of its head."""
        split = self.find(need.model)
        if split is None:
            return
        if need.alias is None:
            need.alias = AliasRequirement(split)
        need.alias.session = need.affinity_key or self._session_keys.read(lines, body)


def _session_keys_of(config: Config) -> AffinityKeyReader:
    routing = config.routing
    if routing.session_headers != RoutingConfig().session_headers:
        return affinity_keys_of(config)
    headers = tuple(name for name in routing.session_headers if name not in _CLIENT_HEADERS)
    return affinity_key_reader(headers, routing.session_body_keys)


def set_alias(
    aliases: ModelAliases, need: Requirements, route: Route, body: bytes, facts: HeadFacts
) -> None:
    """Set the alias that the request names; with `rewrite` also its positions in the body. Raises
    HttpError 400."""
    split = aliases.find(need.model)
    if split is None or need.alias is not None:
        return
    need.alias = AliasRequirement(split)
    if split.rewrite:
        fields = need.body_fields
        read = fields.model if fields is not None else None
        need.alias.spans = model_spans(route, body, facts, read)


def parts_for_target(need: Requirements, route: Route, body: bytes) -> Parts:
    """`body` with the target's model, if `set_alias` has found a model in it."""
    alias, model = need.alias, need.target_model
    if alias is None or model is None or not alias.spans:
        return [body]
    return with_model(body, alias.spans, model, is_json=route.body_kind is not FORM)


def name_adapter(need: Requirements, aliases: ModelAliases | None, body: bytes) -> None:
    """If the body has SGLang's `lora_path`, set the model to `model:adapter`, which only workers
    with that adapter serve. An adapter in the model's name takes precedence, as in SGLang; aliases
    are not changed."""
    model = need.model or ""
    if need.body_fields is None or ":" in model:
        return
    adapters = need.adapters_in_large_body
    if not need.large_body_class and b"lora_path" in body:
        adapters = adapters_of_body(body)
    # A batch may name several adapters, which its worker needs all: no model name expresses that.
    if len(adapters) == 1 and (aliases is None or aliases.find(model) is None):
        need.model = f"{model}:{next(iter(adapters))}"


class TargetChecks(Protocol):
    """Checks of a request for `need.model`, made for each target. The first two raise HttpError 404
    if the request names an unknown worker."""

    def can_take(self, need: Requirements) -> bool:
        """Whether any worker could take the request now."""

    def has_tried_all(self, need: Requirements, tried: Collection[Worker]) -> bool:
        """Whether all workers that could take the request were tried; False if none could."""

    def error_for(self, need: Requirements) -> HttpError:
        """The error with the reason why no worker can take the request."""

    def held_worker(self, need: Requirements) -> Worker | None:
        """The worker that the request's session waits for; None if it does not wait."""


def choose_target(need: Requirements, checks: TargetChecks, tried: Collection[Worker] = ()) -> bool:
    """Set `need.model` to the model of the target for this attempt; returns whether the target
    changed.

    Raises HttpError, as for a model, if no target has a worker that could take the request.
    """
    alias = need.alias
    assert alias is not None
    split, before = alias.split, alias.target
    available = _available(need, checks, tried)
    target = _waiting_target(need, checks, available)
    if target < 0:
        if not available:
            raise _no_target_error(need, checks)
        target = _preferred(alias, available)
    alias.target = target if target >= 0 else split.choose(available)
    need.model = split.models[alias.target]
    return alias.target != before


@dataclass(frozen=True, slots=True)
class TargetExplanation:
    """The target of a request for an alias, and the reason; without a target, the reason for that.

    `available`: for each target, whether it has a worker that could take the request now.
    """

    split: Split
    target: str | None
    reason: str
    available: Sequence[bool]


def explain_target(need: Requirements, checks: TargetChecks) -> TargetExplanation | None:
    """The target that `choose_target` would choose for a new request, without counting it; None for
    a request that names no alias. Sets `need.model` to the target's model."""
    alias = need.alias
    if alias is None:
        return None
    split = alias.split
    available = _available(need, checks)
    shown = [index in available for index in range(len(split.models))]
    waiting = _waiting_target(need, checks, available)
    if waiting >= 0:
        need.model = split.models[waiting]
        return TargetExplanation(split, need.model, "its session waits for a worker there", shown)
    if not available:
        return TargetExplanation(split, None, _no_target_error(need, checks).message, shown)
    alias.target = _preferred(alias, available)
    reason = "its session belongs there"
    if alias.target < 0:
        alias.target = split.preview(available)
        reason = "next in turn by weight"
    elif split.session_order(alias.session)[0] != alias.target:
        reason = "the target of its session has no worker for it now"
    if len(available) == 1 and len(split.models) > 1:
        reason = "no other target has a worker for it now"
    need.model = split.models[alias.target]
    return TargetExplanation(split, need.model, reason, shown)


def any_target(need: Requirements, check: Callable[[Requirements], bool]) -> bool:
    """Whether the check is true for any of the alias's targets."""
    return any(_of_targets(need, check))


def all_targets_tried(need: Requirements, checks: TargetChecks, tried: Collection[Worker]) -> bool:
    """Like `has_tried_all`, for all targets together."""
    able = list(_of_targets(need, checks.can_take))
    through = list(_of_targets(need, lambda target_need: checks.has_tried_all(target_need, tried)))
    return any(able) and all(done for done, can in zip(through, able, strict=True) if can)


def _of_targets(need: Requirements, check: Callable[[Requirements], bool]) -> Iterator[bool]:
    """The result of the check for each target, in their order."""
    alias, requested_model = need.alias, need.model
    assert alias is not None
    try:
        for model in alias.split.models:
            need.model = model
            yield check(need)
    finally:
        need.model = requested_model


def _available(
    need: Requirements, checks: TargetChecks, tried: Collection[Worker] = ()
) -> list[int]:
    """Targets with a worker that could take the request now, preferably with an untried one."""
    able = [index for index, can in enumerate(_of_targets(need, checks.can_take)) if can]
    if not tried:
        return able
    through = list(_of_targets(need, lambda target_need: checks.has_tried_all(target_need, tried)))
    return [index for index in able if not through[index]] or able


def _waiting_target(need: Requirements, checks: TargetChecks, available: Sequence[int]) -> int:
    """The target that can't take the request now because its session waits for a worker there, or
    -1."""
    alias = need.alias
    assert alias is not None
    if not alias.session or len(available) == len(alias.split.models):
        return -1
    held_targets = list(
        _of_targets(need, lambda target_need: checks.held_worker(target_need) is not None)
    )
    return next((n for n, is_held in enumerate(held_targets) if is_held and n not in available), -1)


def _preferred(alias: AliasRequirement, available: Sequence[int]) -> int:
    """The target of the previous attempt, or of the session; -1 if the weights decide."""
    if alias.target in available:
        return alias.target
    if not alias.session:
        return -1
    order = alias.split.session_order(alias.session)
    return next(index for index in order if index in available)


def _no_target_error(need: Requirements, checks: TargetChecks) -> HttpError:
    """The error of the first target that has any worker; sets `need.model` to its model."""
    alias = need.alias
    assert alias is not None
    models = alias.split.models
    errors = []
    for model in models:
        need.model = model
        errors.append(checks.error_for(need))
    index = next((n for n, error in enumerate(errors) if error.code not in _ABSENT), 0)
    need.model = models[index]
    names = ", ".join(repr(model) for model in models)
    errors[index].message += f"; {alias.split.name!r} is an alias of {names}"
    return errors[index]
