"""The configuration in force, in the form in which the data plane reads it.

Invariant: only `configure` writes here, at start and at each reload; everything else reads the
attributes anew for each use, so that a reload holds for open connections, too.
"""

from __future__ import annotations

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.admission.limits import limits_of
from omni_proxy.dataplane.exchange.fast_path_cache import FastPathCache
from omni_proxy.dataplane.loop.io_task import READ_BYTES
from omni_proxy.wire.cors import Cors
from omni_proxy.wire.forwarded import ForwardedHeaders
from omni_proxy.wire.head_caching.request_heads import RequestHeadCache


class Settings:
    """What readers need of a Config, ready for use."""

    def __init__(self, config: Config, proxy_id: str) -> None:
        self._proxy_id = proxy_id.encode()  # see `wire.proxy_headers`
        self.forwarded: ForwardedHeaders | None = None  # None: nothing is written
        self.request_heads = self._head_caches()
        self.configure(config)

    def configure(self, config: Config) -> None:
        server = config.server
        self.config = config
        self.limits = limits_of(config)
        self._forward(
            ForwardedHeaders(
                server.forwarded,
                server.request_id_header.lower().encode(),
                tuple(name.lower().encode() for name in server.request_id_headers),
            )
        )
        readable_fields = filter(None, (server.request_id_header,))
        self.cors = Cors(server.cors_allow_origins, readable_fields)
        self.api_key = server.api_key.encode()
        self.half_close_aborts = server.half_close == "abort"
        self.access_log_is_json = server.log_format == "json"
        # The last chunk of a response is kept where token counts are read in it.
        self.keeps_last_chunk = server.metrics and server.usage_metrics
        # The fast path knows none of these: with them every exchange runs in its coroutine.
        plain = self.forwarded is None and not self.limits.sse_keepalive and not self.api_key
        suits = plain and self.limits.max_body >= READ_BYTES
        self.fast_path_cache = FastPathCache() if suits else None

    def _forward(self, headers: ForwardedHeaders) -> None:
        """Cached heads contain the forwarded headers: they go where these change."""
        forwarded = headers or None
        if forwarded != self.forwarded:
            self.forwarded = forwarded
            self.request_heads = self._head_caches()

    def _head_caches(self) -> tuple[RequestHeadCache, RequestHeadCache]:
        """For plain connections, and for TLS."""
        return (
            RequestHeadCache(self.forwarded, proxy_id=self._proxy_id),
            RequestHeadCache(self.forwarded, secure=True, proxy_id=self._proxy_id),
        )
