"""What a large body needs, told by its head and its beginning, so that the rest can stream.

Contract: an answer here is the same that `inspect` would give the whole body, or the client's word
for it (hints); in any doubt None, and the body is read whole. The body is told nothing else of.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.fleet.registry import Fleet
from omni_proxy.routing.inspect.multipart import form_fields
from omni_proxy.routing.inspect.requirements import (
    STREAMING,
    HeadFacts,
    Requirements,
    by_hints,
    inspect,
    is_json,
)
from omni_proxy.routing.routes import FORM, Route

_ENOUGH_FOR_JSON: Final = frozenset((b"model", b"capabilities"))


def known_early(
    fleet: Fleet, route: Route, beginning: bytes, facts: HeadFacts
) -> Requirements | None:
    """None where the whole body must be seen. Raises Refusal 400 for a bad hint."""
    if is_json(route, facts):
        return by_hints(route, facts) if facts.hints.keys() >= _ENOUGH_FOR_JSON else None
    if route.body is not FORM:
        return inspect(route, b"", facts)
    found, hints = form_fields(beginning, facts.content_type), facts.hints
    if fleet.names_models and "model" not in found and b"model" not in hints:
        return None
    if "stream" in found:
        return inspect(route, beginning, facts)
    if b"stream" in hints:
        return by_hints(route, facts, found.get("model") or None)
    return inspect(route, beginning, facts) if _all_stream(fleet, route.mask) else None


def _all_stream(fleet: Fleet, mask: int) -> bool:
    """Whether nobody would be left out if the rest of the form asked for a stream."""
    return len(fleet.candidates(None, mask)) == len(fleet.candidates(None, mask | STREAMING))
