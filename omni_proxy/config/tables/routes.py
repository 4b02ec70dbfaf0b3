"""`[[routes]]` and `[[control_routes]]`: further routes. Values only."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from omni_proxy.config.fields import (
    Capability,
    Endpoint,
    Method,
    Name,
)


class RouteEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further model route, relayed to one worker unchanged."""

    # Matched exactly; not a built-in route.
    path: Endpoint
    methods: Annotated[tuple[Method, ...], Meta(min_length=1)] = ("POST",)
    # The capability that a worker needs for it.
    capability: Capability = "chat"
    # Keys of the body, dotted for nested ones, whose content is the text for prefix matching:
    # strings, token ids, messages, parts with a text, and lists of these.
    text: tuple[Name, ...] = ()


class ControlRouteEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further control route, sent to every worker."""

    # Matched exactly; not a built-in route.
    path: Endpoint
    # Decides about the operation lock, rotation and the journal, as for built-in routes.
    kind: Literal["read", "plain", "pause", "continue", "group", "update"]
