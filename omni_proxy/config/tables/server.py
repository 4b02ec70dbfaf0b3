"""The tables `[server]` and `[server.timeouts]`: listeners, limits and logs, and `[observe]`:
traces. Values only.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from omni_proxy.config.fields import (
    Count,
    Duration,
    HeaderName,
    HeaderToRead,
    Host,
    LogTarget,
    Mode,
    Name,
    OtlpEndpoint,
    OverloadStatus,
    PortOrZero,
    Size,
    WebOrigin,
)


class TimeoutsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeouts of one exchange; 0 disables one."""

    # A worker in the same network answers a SYN in milliseconds: after this it is unreachable.
    connect_secs: Duration = 5.0
    # Request sent to response head. A unary response is computed before its head: minutes.
    response_head_secs: Duration = 600.0
    # Response head to first body byte: time to first token on a stream. Off: prefill has no bound.
    first_byte_secs: Duration = 0.0
    # Between two chunks of a body. Also disconnects a client that stopped reading.
    idle_secs: Duration = 300.0
    # Idle keep-alive connections. Above the usual 60 s of load balancers: those close them first.
    client_idle_secs: Duration = 75.0
    # From the first to the last byte of a request head: protects against slow-head attacks.
    client_head_secs: Duration = 10.0
    # A client that stalls during its upload is disconnected after this.
    client_body_secs: Duration = 60.0


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Address to listen on; loopback unless the operator opens it.
    host: Host = "127.0.0.1"
    # 0: any free port, which is logged.
    port: PortOrZero = 30000
    # File mode of a Unix socket listener.
    unix_mode: Mode = "0660"
    # Data-plane processes that share the port; 0: one per core.
    processes: Annotated[int, Meta(ge=0, le=1024)] = 1
    # Largest request body in bytes; a larger one gets 413. The default has room for video in JSON.
    max_payload_size: Size = 512 * 1024 * 1024
    # Largest total of request bodies in memory, in bytes, without bodies that arrived with their
    # head; above it 503 with Retry-After.
    max_held_bytes: Size = 2 * 1024 * 1024 * 1024
    # Limit for a whole exchange that does not stream; 0: no limit.
    request_timeout_secs: Duration = 1800.0
    # Most requests in flight over the whole fleet; above it 503 with Retry-After; 0: no limit.
    max_inflight: Count = 0
    # Size of the admission queue: requests above max_inflight, or without a routable worker, wait.
    queue_size: Count = 0
    # Longest wait in the admission queue.
    queue_timeout_secs: Duration = 30.0
    # The priority of a queued request (set in [[keys]]) rises by one per this interval; 0: never.
    priority_aging_secs: Duration = 10.0
    # Status of requests rejected at a limit or a full queue; with 429 a queue timeout gets 408.
    overload_status: OverloadStatus = 503
    # If a client sends FIN before it has its response: `abort` ends the request and frees the
    # worker; `answer` still responds, for clients that half-close early.
    half_close: Literal["abort", "answer"] = "abort"
    # X-Forwarded-For, -Proto, -Host and Via: `append` trusts the received fields, `replace` drops
    # them, `off` passes them on and adds nothing.
    forwarded: Literal["append", "replace", "off"] = "off"
    # Header field with the request id, sent to the worker and back to the client; generated if the
    # client sends none. Empty: received fields are passed on unchanged.
    request_id_header: HeaderName = ""
    # Header fields with the request id for logs and responses: the first one present is used,
    # before X-Request-ID and X-Correlation-ID. The worker gets them unchanged.
    request_id_headers: tuple[HeaderToRead, ...] = ()
    # If set, model traffic needs it as a bearer token (or as X-Api-Key), and so do control routes
    # if no admin key is configured.
    api_key: str = ""
    # true: each connection begins with a PROXY protocol header (v1 or v2) with the client address.
    proxy_protocol: bool = False
    # Seconds between SSE keep-alive comments while a client's stream has not begun; 0: none.
    sse_keepalive_secs: Duration = 0.0
    # Origins whose pages may call model routes and read open routes in a browser, without
    # credentials; "*": any. Routes that change something never allow them.
    cors_allow_origins: tuple[WebOrigin, ...] = ("*",)
    drain_timeout_secs: Duration = 120.0  # after SIGTERM, for requests in flight
    upgrade_timeout_secs: Duration = 60.0  # until the new program is ready, else the old one stays
    # For load balancers that poll /ready: it returns 503 for this long before draining begins.
    ready_off_secs: Duration = 0.0
    # File for changes made over HTTP; `auto`: next to the configuration file; `off`: memory only.
    state_file: Name = "auto"
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    log_format: Literal["text", "json"] = "text"
    # `off`, `-` for stdout, or a path: the program's own log goes there as well as to stderr.
    # Lines of data-plane processes go to stderr only.
    log_file: LogTarget = "off"
    # `off`, `-` for stdout, or a path.
    access_log: LogTarget = "off"
    route_log: LogTarget = "off"  # as access_log; one JSON line per routed request
    # false: exchanges are not counted; /metrics then has workers and configuration only.
    metrics: bool = True
    # true: token counts are read from the last chunk of each response with a `usage`.
    usage_metrics: bool = False
    # PEM files; both or none. Renewed files are loaded without a change of FILE.
    tls_cert: str = ""
    tls_key: str = ""
    # If set, clients need a certificate of one of these CAs.
    tls_client_ca: str = ""
    # false: a client may send no certificate; an invalid one is still refused.
    tls_client_require: bool = True
    # CAs of https workers without tls_ca; empty: the system's.
    tls_worker_ca: str = ""
    timeouts: TimeoutsConfig = TimeoutsConfig()


class ObserveConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Base URL of a trace collector: spans are sent to its /v1/traces by OTLP over HTTP; needs the
    # extra `otel`. Empty: no tracing.
    otlp_endpoint: OtlpEndpoint = ""
    # Share of traces that is sampled, if the client sends no traceparent; the sampling decision in
    # a traceparent is kept.
    trace_sampling: Annotated[float, Meta(ge=0, le=1)] = 1.0
