"""The current configuration in the form that the data plane uses: limits, caches, flags.

Invariant: only `configure` and `follow_*` write here; all others read the attributes at each use,
so that a reload also applies to open connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_proxy.api_keys.caller_limits import SlotRows
from omni_proxy.api_keys.caller_lookup import KEY_FIELDS, Callers
from omni_proxy.api_keys.key_table import KeyTable
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.dataplane.exchange.fast_path_cache import FastPathCache, FastPathFlags
from omni_proxy.dataplane.exchange.request_trace import Tracing
from omni_proxy.dataplane.loop.stream import READ_BYTES
from omni_proxy.dataplane.timeouts import timeouts_of
from omni_proxy.routing.inspect.response_usage import count_tokens
from omni_proxy.routing.policies import reads_prompts
from omni_proxy.routing.policies.cache_feedback import learns_from_answers
from omni_proxy.routing.routes import configured_routes
from omni_proxy.wire.cors import RATE_FIELDS, Cors
from omni_proxy.wire.forwarded import ForwardedHeaders
from omni_proxy.wire.head_caching.request_heads import RequestHeadCache


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on requests: `max_body` and `held` in bytes."""

    max_body: int
    held: int  # of all requests together
    in_flight: int  # 0: no bound


def limits_of(config: Config) -> RequestLimits:
    server = config.server
    return RequestLimits(
        max_body=server.max_payload_size, held=server.max_held_bytes, in_flight=server.max_inflight
    )


class Settings:
    """The values of a Config, prepared for use."""

    def __init__(self, config: Config, proxy_id: str) -> None:
        self._proxy_id = proxy_id.encode()  # see `wire.forwarded`
        self.forwarded: ForwardedHeaders | None = None  # None: no forwarded headers
        self.callers = Callers(count_tokens)
        self.request_heads = self._head_caches()
        self._has_ranks = self._has_pools = False
        self.configure(config)

    def configure(self, config: Config) -> None:
        server = config.server
        self.config = config
        self.limits = limits_of(config)
        self.timeouts = timeouts_of(config)
        self.routes = configured_routes(config.routes)
        was_guarded = self.callers.guarded
        self.callers.configure(config)
        if self.callers.guarded != was_guarded:
            self.request_heads = self._head_caches()
        self._forward(
            ForwardedHeaders(
                server.forwarded,
                server.request_id_header.lower().encode(),
                tuple(name.lower().encode() for name in server.request_id_headers),
            )
        )
        rates = RATE_FIELDS if config.keys else ()
        readable_fields = filter(None, (server.request_id_header, *rates))
        self.cors = Cors(server.cors_allow_origins, readable_fields)
        self.half_close_aborts = server.half_close == "abort"
        self.access_log_is_json = server.log_format == "json"
        # The last chunk of each response is kept if token counts are read from it. See also
        # `Exchange.reads_usage`.
        self.counts_usage = server.metrics and server.usage_metrics
        observe = config.observe
        self.tracing = Tracing(observe.trace_sampling) if observe.otlp_endpoint else None
        self.keeps_last_chunk = self.counts_usage or learns_from_answers(config.routing)
        self._reads_prompts = reads_prompts(config.routing) or bool(config.routing.models)
        self._renew_fast_path_cache()

    def follow_keys(
        self, table: KeyTable[CallerKey], slots: Mapping[str, int], rows: SlotRows
    ) -> None:
        """Apply the keys of the current configuration, and the slots of their callers' counts."""
        self.callers.follow(table, slots, rows)
        self._renew_fast_path_cache()

    def follow_fleet(self, *, has_ranks: bool, has_pools: bool) -> None:
        """Apply whether some worker has ranks or a role, so that the checks are skipped if none
        does."""
        if (has_ranks, has_pools) != (self._has_ranks, self._has_pools):
            self._has_ranks, self._has_pools = has_ranks, has_pools
            self._renew_fast_path_cache()

    def _renew_fast_path_cache(self) -> None:
        # The fast path supports none of these: with them every exchange runs in its coroutine.
        plain = self.forwarded is None and not self.timeouts.sse_keepalive
        suits = plain and self.limits.max_body >= READ_BYTES
        self.fast_path_cache = self._new_fast_path_cache() if suits else None

    def _new_fast_path_cache(self) -> FastPathCache:
        return FastPathCache(
            self.routes,
            FastPathFlags(self._has_ranks, self._has_pools, self._reads_prompts),
            callers=self.callers if self.callers.guarded else None,
            tracing=self.tracing,
        )

    def _forward(self, headers: ForwardedHeaders) -> None:
        """Set the forwarded headers. Cached heads contain them, so a change drops the caches."""
        forwarded = headers or None
        if forwarded != self.forwarded:
            self.forwarded = forwarded
            self.request_heads = self._head_caches()

    def _head_caches(self) -> tuple[RequestHeadCache, RequestHeadCache]:
        """The caches for plain connections and for TLS."""
        # If requests need a key, it is part of the cache key, so that it is constant in a template.
        read = KEY_FIELDS if self.callers.guarded else frozenset()
        plain, secure = (
            RequestHeadCache(self.forwarded, secure=secure, proxy_id=self._proxy_id, read=read)
            for secure in (False, True)
        )
        return plain, secure
