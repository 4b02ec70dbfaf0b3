"""What the fleet, the policy and the aliases add to the requirements of a request, before its
worker is chosen: one implementation for relayed, picked and explained requests and for WebSocket
sessions.

Invariant: call `pin_request` first, then `complete_requirements`. Nothing here counts the request
or chooses its worker. Only the affinity key is read from a body that is parsed in slices. Of a body
that is too large to be read whole first, `requirements_of_beginning` returns the same requirements
as for the whole body, or None; a request whose unread fields might decide which workers are
eligible is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.routing.inspect.affinity_key import AffinityKeyReader, session_key
from omni_proxy.routing.inspect.body_fields import form_fields, keyed_fields
from omni_proxy.routing.inspect.requirements import (
    STREAMING,
    HeadFacts,
    Requirements,
    has_json_body,
    inspect_request,
    requirements_of_hints,
)
from omni_proxy.routing.model_aliases import ModelAliases, name_adapter
from omni_proxy.routing.pinning import (
    ResponseOwners,
    named_response,
    pin_to_rank,
    pin_to_response_owner,
    pin_to_voice_owner,
)
from omni_proxy.routing.policies import Policy
from omni_proxy.routing.routes import FORM, RESPONSE_OWNER, Route
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.header_fields import HINT_PREFIX_TEXT


class RoutingState(Protocol):
    """The state that completes requirements: of the data plane, or a view of it.

    `needs_affinity_key`: the policy of regular workers, or of a pool, needs it.
    """

    @property
    def policy(self) -> Policy: ...
    @property
    def needs_affinity_key(self) -> bool: ...
    @property
    def affinity_keys(self) -> AffinityKeyReader: ...
    @property
    def voices(self) -> VoiceRegistry: ...
    @property
    def response_owners(self) -> ResponseOwners: ...
    @property
    def aliases(self) -> ModelAliases | None: ...


class RequestParts(NamedTuple):
    """A request as its requirements are read from it.

    `lines`: the head, in parts. `path`: without the query; it and `hints` (of the head) are only
    for `pin_request`. `session`: the affinity key if it is known, else it is read from head and
    body. `takes_pair`: a prefill and a decode worker may serve the request together.
    """

    route: Route
    lines: Sequence[bytes]
    body: bytes
    path: str = ""
    hints: Mapping[bytes, bytes] = {}
    session: bytes = b""
    takes_pair: bool = True


def pin_request(
    routing: RoutingState, fleet: Fleet, need: Requirements, request: RequestParts, now: float
) -> None:
    """Restrict the request to workers that have what it names: a rank, a stored voice, a stored
    response. Also reads the texts of a route with its own keys. `now`: seconds of the event loop's
    clock. Raises HttpError 400."""
    route, body = request.route, request.body
    if need.large_body_class:
        check_large_body(fleet, need)
        body = b""
    if fleet.has_ranks:
        pin_to_rank(need, request.hints, body)
    if route.traffic != "generation":
        pin_to_voice_owner(routing.voices, route.traffic, need)
        if route.text and body:
            need.body_fields = keyed_fields(body, route.text)
        if route.pinning is RESPONSE_OWNER:
            named_id = named_response(request.path, body)
            pin_to_response_owner(need, named_id, routing.response_owners, now)


def complete_requirements(
    routing: RoutingState, fleet: Fleet, need: Requirements, request: RequestParts
) -> None:
    """Set the legs, the affinity key, the adapter, and the session of an alias."""
    needs_key = routing.policy.needs_affinity_key
    if request.takes_pair and fleet.has_pools:
        need.legs = request.route.legs
        needs_key = routing.needs_affinity_key
    if needs_key and request.session:
        need.affinity_key = session_key(request.session)
    elif needs_key:
        need.affinity_key = routing.affinity_keys.read(b"".join(request.lines), request.body)
    if fleet.has_adapters:
        name_adapter(need, routing.aliases, request.body)
    if routing.aliases is not None:
        routing.aliases.resolve(need, b"".join(request.lines), request.body)


def check_large_body(fleet: Fleet, requirements: Requirements) -> None:
    """Check that the unread fields of a large body don't matter for the choice of a worker, or are
    given as hints. Raises HttpError 400."""
    given_hints = requirements.given_hints
    candidates = fleet.candidates(None, requirements.mask)
    # Items of a batch may name other models than the batch.
    batch = requirements.large_body_class == "speech_batch"
    mixed = len({worker.model for worker in candidates}) > 1
    if mixed and b"model" not in given_hints and (batch or requirements.model is None):
        kind = "large speech batch requests" if batch else "large JSON requests"
        message = f"{kind} across mixed-model workers require {HINT_PREFIX_TEXT}model"
        raise HttpError(400, message, "model_hint_required")
    if b"capabilities" in given_hints or not candidates:
        return
    widest = max((worker.mask for worker in candidates), key=int.bit_count)
    if any(worker.mask & ~widest for worker in candidates):
        hint = f"{HINT_PREFIX_TEXT}capabilities"
        message = f"large JSON requests across mixed-capability workers require {hint}"
        raise HttpError(400, message, "capabilities_hint_required")
    if any(worker.mask != widest for worker in candidates):
        requirements.mask |= widest


# A large body can be streamed if head and first bytes are sufficient for all requirements.
# Otherwise the whole body is read first.

_ENOUGH_FOR_JSON: Final = frozenset((b"model", b"capabilities"))


def requirements_of_beginning(
    fleet: Fleet, route: Route, beginning: bytes, facts: HeadFacts
) -> Requirements | None:
    """None if the whole body is needed. Raises HttpError 400 for an invalid hint."""
    if has_json_body(route, facts):
        if fleet.has_ranks:  # the body may name a rank, or needs an added key for one
            return None
        enough = facts.hints.keys() >= _ENOUGH_FOR_JSON
        return requirements_of_hints(route, facts) if enough else None
    if route.body_kind is not FORM:
        return inspect_request(route, b"", facts)
    texts, hints = form_fields(beginning, facts.content_type), facts.hints
    if fleet.has_named_models and "model" not in texts and b"model" not in hints:
        return None
    if "stream" in texts:
        return inspect_request(route, beginning, facts)
    if b"stream" in hints:
        return requirements_of_hints(route, facts, texts.get("model") or None)
    return inspect_request(route, beginning, facts) if _all_stream(fleet, route.mask) else None


def _all_stream(fleet: Fleet, mask: int) -> bool:
    """Whether the same workers are eligible if the rest of the form requests a stream."""
    return len(fleet.candidates(None, mask)) == len(fleet.candidates(None, mask | STREAMING))
