"""The requirements of a body that is too large to be read whole before a worker is chosen.

Invariant: `requirements_of_beginning` returns the same requirements as for the whole body, or None;
`check_large_body` refuses a request whose unread fields might decide which workers are eligible.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.fleet.registry import Fleet
from omni_proxy.routing.inspect.body_fields import form_fields
from omni_proxy.routing.inspect.requirements import (
    STREAMING,
    HeadFacts,
    Requirements,
    has_json_body,
    inspect_request,
    requirements_of_hints,
)
from omni_proxy.routing.routes import FORM, Route
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.header_fields import HINT_PREFIX_TEXT


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
