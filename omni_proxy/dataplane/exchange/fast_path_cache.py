"""Decides which requests may take the fast path: those whose head matches a parsed one.

Pure. Invariant: such a request has the same head except for the varying values, and only its body
decides which workers of its route may serve it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from omni_proxy.api_keys.caller_limits import ApiCaller
from omni_proxy.api_keys.caller_lookup import Callers, key_in, without_key_lines
from omni_proxy.dataplane.exchange.request_trace import (
    EVERY,
    Tracing,
    has_state_alone,
    traceparent_index,
)
from omni_proxy.routing.inspect.body_fields import (
    ABSENT,
    BodyFields,
    RoutedFields,
    decode_body,
    decode_routed,
    decode_strict,
)
from omni_proxy.routing.inspect.plain_body import READS_BODIES
from omni_proxy.routing.inspect.requirements import has_json_body
from omni_proxy.routing.pinning import SPEECH_TRAFFIC, may_name_rank
from omni_proxy.routing.routes import (
    UNPINNED,
    ConfiguredRoutes,
    MethodNotAllowed,
    Route,
    find_route,
)
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.head_caching.lru import LruCache
from omni_proxy.wire.head_caching.request_heads import TEMPLATES
from omni_proxy.wire.header_fields import RANK_HINT
from omni_proxy.wire.request import RequestHead
from omni_proxy.wire.scan.head_template import HeadTemplate


class CachedRequest:
    """A kind of request that may take the fast path. `head`: without the varying values. `source`:
    the cache that it is from."""

    __slots__ = (
        "caller",
        "decode",
        "decode_ascii",
        "decodes_later",
        "head",
        "reads_plain_body",
        "route",
        "sampled_below",
        "source",
        "template",
        "trace_index",
        "tracing",
    )

    def __init__(
        self, head: RequestHead, template: HeadTemplate, route: Route, source: FastPathCache
    ) -> None:
        fixed_id = head.request_id if template.id_index < 0 else b""
        self.head = msgspec.structs.replace(
            head, lines=template.first, length=0, request_id=fixed_id
        )
        self.caller: ApiCaller | None = None
        self.template = template
        # Index of the traceparent's value in the parts of a head, -1 without one.
        self.trace_index = traceparent_index(
            [(same, after is not None) for same, _, _, after in template.steps]
        )
        # A request is unsampled if its random bits are not below this. EVERY: always look further.
        self.tracing, self.sampled_below = source.tracing, EVERY
        if source.tracing is not None and self.trace_index < 0:
            self.sampled_below = source.tracing.sampled_below
        self.route = route
        self.source = source
        self.reads_plain_body = (
            READS_BODIES and route.traffic == "generation" and not source.has_ranks
        )
        # Raises HttpError for a body that can't take the fast path.
        self.decode: Callable[[bytes], RoutedFields] = (
            decode_unless_ranked if source.has_ranks else decode_body
        )
        # For a body in ASCII, without the frame of `decode_body`. It also raises MALFORMED, for a
        # body that only `decode_body` accepts (NaN, a lone surrogate): the coroutine handles it.
        self.decode_ascii: Callable[[bytes], RoutedFields] = (
            self.decode if source.has_ranks else decode_strict
        )
        # The fields of the prompt are decoded only when something reads them.
        self.decodes_later = route.traffic == "generation" and not (
            source.reads_prompts or source.has_ranks or source.has_pools
        )
        if self.decodes_later:
            self.decode_ascii = decode_routed


class _RankedFields(BodyFields, gc=False):
    """Body fields and the keys that name a rank, which `routing.pinning` reads."""

    routed_dp_rank: msgspec.Raw = ABSENT
    data_parallel_rank: msgspec.Raw = ABSENT


_decode_ranked: Callable[[bytes], _RankedFields] = msgspec.json.Decoder(_RankedFields).decode


def decode_unless_ranked(body: bytes) -> BodyFields:
    """As `decode_body`, but also raises for a body that may name a rank: then the coroutine must
    handle the request."""
    try:
        fields = _decode_ranked(body)
        if not body.isascii():  # the decoder does not validate skipped fields
            body.decode()
    except MALFORMED:
        if may_name_rank(body):
            raise rank_error() from None
        return decode_body(body)
    if fields.routed_dp_rank or fields.data_parallel_rank:
        raise rank_error()
    return fields


def rank_error() -> HttpError:
    """The error for a body that may name a rank; it is never sent to a client."""
    return HttpError(400, "it may name a data-parallel rank", "invalid_rank")


def has_fixed_traceparent(template: HeadTemplate) -> bool:
    """Whether the template forwards a traceparent whose value does not vary."""
    texts = [template.first, *(after for *_, after in template.steps if after is not None)]
    lines = [line for text in texts for line in text.lower().split(b"\r\n")[1:]]
    # The last line of each text but the last is followed by a varying value.
    open_ends = [text.lower().rpartition(b"\r\n")[2] for text in texts[:-1]]
    trace_lines = [line for line in lines if line.startswith(b"traceparent:")]
    return len(trace_lines) > len([line for line in open_ends if line.startswith(b"traceparent:")])


class _Never:
    """Stands for a CachedRequest: requests with this head always run in the coroutine."""


_NEVER: Final = _Never()


class FastPathFlags(NamedTuple):
    """What all requests have in common. `has_ranks`: the fleet has data-parallel ranks, so requests
    that may name one are excluded. `has_pools`: some requests may be served in two legs.
    `reads_prompts`: the policy, or an alias, reads more of each body than `RoutedFields`."""

    has_ranks: bool = False
    has_pools: bool = False
    reads_prompts: bool = True


class FastPathCache:
    """Cached requests of all connections, under one configuration. `callers`: set if requests need
    a key, which is then a constant part of each template. `tracing`: set if workers get a trace
    context."""

    def __init__(
        self,
        routes: ConfiguredRoutes,
        flags: FastPathFlags,
        *,
        callers: Callers | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.has_ranks, self.has_pools, self.reads_prompts = flags
        self.tracing = tracing
        self._callers = callers
        self._routes = routes
        self._by_template: LruCache[HeadTemplate, CachedRequest | _Never] = LruCache(TEMPLATES)

    def find(self, head: RequestHead) -> CachedRequest | None:
        """The entry for requests with the same template as `head`; None if they can't take the fast
        path."""
        template = head.template
        if template is None:
            return None
        cached = self._by_template.get(template)
        if cached is None:
            cached = self._cached(head, template) or _NEVER
            self._by_template.put(template, cached)
        return cached if isinstance(cached, CachedRequest) else None

    def _cached(self, head: RequestHead, template: HeadTemplate) -> CachedRequest | None:
        if not template.counted:
            return None
        method, _, path = head.log_words
        try:
            route = find_route(self._routes, method, path)
        except MethodNotAllowed:
            return None
        if route is None or route.websocket or route.pinning is not UNPINNED or route.text:
            return None
        if route.traffic in SPEECH_TRAFFIC:  # a voice may bind it to one worker
            return None
        hinted = head.hints if self.has_ranks else head.hints.keys() - {RANK_HINT}
        special = hinted or head.origin or head.upgrade or head.expects_continue or head.http_1_0
        if special or not head.keep_alive or not has_json_body(route, head):
            return None
        if self.tracing is not None and (
            has_fixed_traceparent(template) or has_state_alone(head.lines)
        ):
            return None  # the field to replace or drop is not a separate part
        cached = CachedRequest(head, template, route, self)
        return self._authorized(cached, key_in(head.lines)) if self._callers else cached

    def _authorized(self, cached: CachedRequest, key: bytes) -> CachedRequest | None:
        """`cached` with its caller, and without the key in the forwarded lines; None for an invalid
        key."""
        callers = self._callers
        assert callers is not None
        try:
            cached.caller = callers.find(key, counts=False)
        except HttpError:
            return None
        if callers.keyed:
            cached.template = _without_key(cached.template)
            cached.head.lines = cached.template.first
        return cached


def _without_key(template: HeadTemplate) -> HeadTemplate:
    """A template that matches the same heads, but does not forward the key. The key never varies,
    so its lines are inside the constant texts."""
    steps = tuple(
        (same, size, forbidden, after if after is None else without_key_lines(after))
        for same, size, forbidden, after in template.steps
    )
    return HeadTemplate(
        without_key_lines(template.first), steps, template.last,
        counted=template.counted, id_index=template.id_index,
    )  # fmt: skip
