"""The configuration schema: every key, its type, its range and its default.

Values only: `parse` validates; a struct that is built directly is not checked. Nothing here may
read the environment, the clock or a file. Comments above keys appear in docs/configuration.md.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from omni_proxy.config.api_keys import CallerKey, KeySource
from omni_proxy.config.fields import (
    CAPABILITIES,
    Address,
    AtLeastOne,
    BodyKey,
    Capabilities,
    Capability,
    Count,
    Duration,
    Endpoint,
    HeaderName,
    HeaderToRead,
    Host,
    HostName,
    Interval,
    KvEvents,
    KvReplay,
    Listen,
    LogTarget,
    Loras,
    Method,
    Mode,
    Name,
    OptionalWorkerUrl,
    OtlpEndpoint,
    OverloadStatus,
    PolicyName,
    PoolPolicyName,
    Port,
    PortOrZero,
    Ranks,
    RetryCause,
    SessionHeader,
    Size,
    WebOrigin,
    Weight,
    WorkerRanks,
    WorkerUrl,
)
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.config.tables.picker import PickerConfig
from omni_proxy.config.url import normalize_url
from omni_proxy.shared.engine_protocol import DEFAULT_BOOTSTRAP_PORT


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


class CacheAwareConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cache_aware policy: requests with a common prefix go to the same worker."""

    # The longest match decides if it covers more than this share of the text.
    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    # If the most and the least loaded worker differ by more than both, load decides, not the cache.
    balance_abs_threshold: Count = 32
    balance_rel_threshold: Annotated[float, Meta(ge=1, le=1_000_000)] = 1.0001
    # Seconds between evictions.
    eviction_interval_secs: Interval = 60.0
    # Size of the prefix tree in bytes, for the whole fleet; a prefix of many workers counts once.
    max_tree_size: AtLeastOne = 16 * 1024 * 1024
    # The choice if no match is above cache_threshold.
    fallback: Literal["smallest_tree", "least_loaded"] = "smallest_tree"
    # If several workers have the longest match: the least loaded (all), or round robin (longest).
    holders: Literal["all", "longest"] = "all"
    # Load decides for all once any two workers differ too much; or once the chosen one is too busy.
    spill: Literal["global", "chosen"] = "global"
    # Largest share of its choices that smallest_tree gives to a new worker; 0: no limit.
    warmup_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    # The longest match above cache_threshold, or the lowest cost in prompt tokens.
    score: Literal["match", "cost"] = "match"
    # For `cost`: multiplier of uncached prompt tokens; tokens added for each request in flight.
    uncached_weight: Annotated[float, Meta(ge=0, le=1_000)] = 2.0
    request_cost_tokens: Count = 512
    # Drop prefixes that a worker's response (`cached_tokens`) shows to be no longer cached.
    feedback: bool = True
    # What workers have cached: inferred from the prompts sent, or taken from engines' KV events.
    source: Literal["inferred", "events"] = "inferred"
    # With `events`: the tokens of long texts are fetched from the engine, in parallel to requests.
    tokenize: Literal["off", "engine"] = "off"
    # Cached blocks to index from KV events, over all workers; above it the oldest are dropped.
    max_index_blocks: AtLeastOne = 4 * 1024 * 1024


class PrefixHashConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prefix_hash policy: a hash of the text's prefix determines the worker."""

    # Length of the prefix in bytes of UTF-8. With a shorter one, more requests share a worker.
    prefix_length: AtLeastOne = 1024
    # A worker above this multiple of the mean load is skipped.
    load_factor: Annotated[float, Meta(ge=1, le=1_000_000)] = 1.25


class DisaggregationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests in two legs: a prefill worker computes the prompt's KV cache, a decode worker
    continues from it."""

    # The policy that picks the prefill worker; empty: routing.policy.
    prefill_policy: PoolPolicyName = ""
    # The policy that picks the decode worker; empty: routing.policy.
    decode_policy: PoolPolicyName = ""
    # If fewer prompt tokens than this are uncached at the decode worker, it computes the prompt
    # itself; 0: always two legs.
    min_uncached_tokens: Count = 0
    # Longest wait for prefill's response, then for decode's first byte; 0: response_head_secs only.
    transfer_timeout_secs: Duration = 30.0
    # Without a prefill worker, or if it failed: the decode worker computes the prompt (never with
    # kv_connector sglang, whose engines can't), or 503.
    fallback: Literal["decode", "refuse"] = "decode"


class AliasTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A model that workers serve.
    model: Name
    # Share of the alias's requests relative to its other targets.
    weight: Weight = 1


class ModelAlias(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model name that the proxy defines: its requests go to workers of its targets, by weight."""

    # The model name in requests.
    name: Name
    targets: Annotated[tuple[AliasTarget, ...], Meta(min_length=1)]
    # true: the body's model becomes the target's; false: bodies stay unchanged.
    rewrite: bool = True


class RoutingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # The policy that picks one of the eligible workers.
    policy: PolicyName = "round_robin"
    # The model of workers that name none.
    model: str = ""
    # The data-parallel ranks of workers that name none; "auto": as their engines report.
    ranks: Ranks = 1
    # The worker that keeps uploaded voices; empty: the one that got the first upload.
    voice_owner: OptionalWorkerUrl = ""
    # Failed attempts in a row, over all requests, that eject a worker; 0: never.
    max_worker_retries: Count = 3
    # Attempts of one request in all; 0 and 1: no retry.
    max_total_retries: Count = 6
    # Causes of a retry, which is possible only before a response byte was relayed. A 500 counts as
    # a failed attempt if it is listed here; 502 and 504 always do, the other statuses never.
    retry_on: tuple[RetryCause, ...] = ("connect_failure", "reset_before_response", "503")
    # A larger body is sent once: keeping it for a retry would cost too much memory.
    retry_body_bytes: Size = 8 * 1024 * 1024
    # Requests after pause_generation: passed on to be queued by workers, held here, or 503.
    while_paused: Literal["pass", "hold", "shed"] = "pass"
    # An ejected worker returns after good probes, returns by an operator's action, or is removed.
    eject: Literal["unhealthy", "dead", "remove"] = "unhealthy"
    # true: requests with the same affinity key stay with one worker, under any policy.
    sticky_sessions: bool = False
    # A session that was idle for this long is dropped; 0: never.
    sticky_idle_secs: Duration = 14400.0
    # Most sessions; above it the longest idle one is dropped.
    sticky_max: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    # Worker of a new session: the policy's choice, or the one with the fewest live sessions.
    sticky_load: Literal["requests", "sessions"] = "requests"
    # A session moves once its worker's requests in flight exceed those of the least loaded worker
    # by this number; 0: never ...
    sticky_rebalance_abs: Count = 0
    # ... and by this factor.
    sticky_rebalance_rel: Annotated[float, Meta(ge=1, le=1_000_000)] = 1.5
    # Waiting requests in its engine that make a worker overloaded, so others are preferred; 0: off.
    overload_waiting: Count = 0
    # Share of its KV cache in use, 0 to 1, that makes a worker overloaded; 0: off.
    overload_kv_usage: Annotated[float, Meta(ge=0, le=1)] = 0.0
    # Load reports that are older than this are ignored.
    load_max_age_secs: Interval = 5.0
    # Seconds between polls of engines for their load; 0: not polled.
    load_poll_secs: Duration = 0.0
    # Header fields that may have the session's affinity key; the first one present is used.
    session_headers: tuple[SessionHeader, ...] = (
        "x-smg-routing-key", "x-session-id", "x-claude-code-session-id", "session-id",
        "authorization", "x-forwarded-for", "cookie",
    )  # fmt: skip
    # Without such a field: the first of these keys in the JSON body; dots enter nested objects.
    session_body_keys: tuple[BodyKey, ...] = ()
    cache_aware: CacheAwareConfig = CacheAwareConfig()
    prefix_hash: PrefixHashConfig = PrefixHashConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    models: tuple[ModelAlias, ...] = ()


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Path to probe on the worker; healthy is 200.
    endpoint: Endpoint = "/health"
    # Between two probes of one worker; at most 10 s if it is out of rotation.
    interval_secs: Interval = 10.0
    # Timeout of one probe.
    timeout_secs: Interval = 5.0
    # Failed probes in a row until a worker leaves rotation.
    failure_threshold: AtLeastOne = 3
    # Good probes in a row until it returns to rotation.
    success_threshold: AtLeastOne = 2
    # `unhealthy` recovers by good probes; `dead` waits for an operator (or the launcher that
    # restarted it).
    on_threshold: Literal["dead", "unhealthy"] = "unhealthy"
    # false: a worker in rotation is not probed, so only failed requests eject it; a worker that is
    # new or out of rotation is probed until it is healthy.
    probe_healthy: bool = True
    # A worker that is not healthy within this time after it was added is reported as failed; 0:
    # never. It is still probed, and gets requests once it is healthy.
    startup_timeout_secs: Duration = 0.0


AdminRole: TypeAlias = Literal["read", "operate", "weights", "all"]


class AdminKey(KeySource, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further admin key, with a role. If there is one, control routes need a key."""

    # What it permits: `read` all reads; `operate` also changes of workers and reloads; `weights`
    # also weight updates and pauses; `all` everything.
    role: AdminRole = "read"


class AdminConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Largest body of a control request, in bytes; a larger one gets 413.
    max_body_bytes: Size = 64 * 1024 * 1024
    # true: /metrics needs no key.
    open_metrics: bool = False
    # If set, changes need it as a bearer token; it permits everything. If it is empty and there are
    # no [[admin.keys]], [server] api_key is used instead.
    api_key: str = ""
    # "host:port" or "unix:PATH": control routes are served only there.
    listen: Listen = ""
    # "host:port" or "unix:PATH": serves GET /metrics without a key, and nothing else.
    metrics_listen: Listen = ""
    # false: the admin listener requires no key.
    listen_key: bool = True
    # Host names, besides IP addresses and localhost, under which control routes without a key are
    # served: any other name may be an attacker's that resolves to this address (DNS rebinding).
    allowed_hosts: tuple[HostName, ...] = ()
    # `off`, `-` for stdout, or a path: one JSON line for each call that changes something, refused
    # calls included.
    audit_log: LogTarget = "off"
    # Weight updates run one at a time: the next one waits this long, then gets 503.
    lock_timeout_secs: Duration = 300.0
    # Timeout of a control call at one worker.
    worker_timeout_secs: Duration = 600.0
    keys: tuple[AdminKey, ...] = ()


class ObserveConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Base URL of a trace collector: spans are sent to its /v1/traces by OTLP over HTTP; needs the
    # extra `otel`. Empty: no tracing.
    otlp_endpoint: OtlpEndpoint = ""
    # Share of traces that is sampled, if the client sends no traceparent; the sampling decision in
    # a traceparent is kept.
    trace_sampling: Annotated[float, Meta(ge=0, le=1)] = 1.0


class WeightSyncConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Members of the trainer's process group: each worker with its own ranks (coordinate), the proxy
    # for all workers (receive), or both. off: calls are sent to every worker unchanged.
    mode: Literal["coordinate", "receive", "both", "off"] = "coordinate"
    # auto: the trainer's choice.
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    # Receiving blocks in the backend's native code: a separate process can be killed.
    isolation: Literal["process", "thread"] = "process"
    # Until every rank has joined the process group.
    init_timeout_secs: Duration = 1800.0
    # Until every rank is ready to receive.
    ready_timeout_secs: Duration = 60.0
    # From the trainer's complete call to the last bucket.
    receive_timeout_secs: Duration = 300.0
    # A transfer without progress for this long is aborted.
    stall_timeout_secs: Duration = 30.0
    # Folder of stored versions; empty: next to the state file.
    store_dir: str = ""
    keep_versions: AtLeastOne = 2
    # checksum: all replicas must have the same checksum before they serve again.
    verify: Literal["checksum", "off"] = "checksum"
    # After a partial failure: keep the failed workers out, roll back all, or retry the failed ones.
    on_failure: Literal["quarantine", "rollback", "forward"] = "quarantine"
    # Time for requests in flight to end before their worker is paused or updated.
    drain_secs: Duration = 0.0
    # New requests during an update: held here, 503, or passed on.
    while_updating: Literal["hold", "shed", "pass"] = "hold"


class WorkerEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Base URL, normalized by `parse`; or unix:PATH.
    url: WorkerUrl
    # Empty: routing.model, and if that is empty too, any model.
    model: str = ""
    capabilities: Capabilities = CAPABILITIES
    # true: no new requests; still probed.
    disabled: bool = False
    # Share of requests relative to the other workers.
    weight: Weight = 1
    # Most requests in flight on this worker; 0: no limit.
    max_inflight: Count = 0
    # Environment variable with the bearer key for this worker. A name, so that FILE holds no key.
    api_key_env: str = ""
    # Empty: as its /server_info reports, regular if it reports none.
    role: Literal["", "regular", "prefill", "decode"] = ""
    # Protocol of KV transfer between prefill and decode workers, the same for both workers of a
    # pair. Empty: sglang.
    kv_connector: Literal["", "sglang", "nixl", "mooncake"] = ""
    # Bootstrap port of a prefill worker (sglang, mooncake); 0: as its /server_info reports.
    bootstrap_port: PortOrZero = DEFAULT_BOOTSTRAP_PORT
    # Data-parallel ranks behind this URL; above 1 each is picked and counted separately; 0:
    # routing.ranks; "auto": as the engine reports.
    ranks: WorkerRanks = 0
    # Adapters that requests may name as their model; "auto": those of its /v1/models.
    loras: Loras = ()
    # Endpoint where its engine publishes KV events: "tcp://host:port" (data-parallel rank r: port +
    # r; with the host * the engine connects to the proxy); "auto": as the engine reports.
    kv_events: KvEvents = "off"
    # Endpoint that replays missed batches of KV events, "tcp://host:port"; empty: none.
    kv_replay: KvReplay = ""
    # For https: PEM file of CAs for its certificate; empty: server.tls_worker_ca.
    tls_ca: str = ""
    # false: its certificate is not verified: any host at its address can get its requests and key.
    tls_verify: bool = True


class LaunchEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of replicas that the proxy starts, watches, restarts and stops."""

    name: Name = "local"
    # {host} and {port} are substituted for each replica; {5557+index} is 5557 for the first
    # replica, 5558 for the second.
    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    replicas: Annotated[int, Meta(ge=0, le=1024)] = 1
    host: Address = "127.0.0.1"
    # Replica i listens on base_port + i.
    base_port: Port = 31000
    # Above 0 each replica gets its own slice of the GPUs in CUDA_VISIBLE_DEVICES.
    gpus_per_replica: Count = 0
    # If a replica is not ready after this, its start has failed. Loading weights takes minutes.
    ready_timeout_secs: Duration = 300.0
    restart: Literal["on_failure", "never"] = "on_failure"
    capabilities: Capabilities = CAPABILITIES
    # Empty: as for a worker.
    model: str = ""
    # Role of the replicas, as for a worker. Replica i has bootstrap port base_bootstrap_port + i,
    # substituted for {bootstrap_port} in the command and in env.
    role: Literal["", "regular", "prefill", "decode"] = ""
    kv_connector: Literal["", "sglang", "nixl", "mooncake"] = ""
    base_bootstrap_port: Port = DEFAULT_BOOTSTRAP_PORT
    # "auto": follow KV events if the engine reports that it publishes them; as for a worker.
    kv_events: Literal["off", "auto"] = "off"
    # Added to the environment of each replica.
    env: dict[str, str] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        """One worker URL per replica, in order, normalized."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return tuple(
            normalize_url(f"http://{host}:{self.base_port + i}", allow_unix=False)
            for i in range(self.replicas)
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


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    routing: RoutingConfig = RoutingConfig()
    health: HealthConfig = HealthConfig()
    admin: AdminConfig = AdminConfig()
    observe: ObserveConfig = ObserveConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    cluster: ClusterConfig = ClusterConfig()
    picker: PickerConfig = PickerConfig()
    workers: tuple[WorkerEntry, ...] = ()
    launch: tuple[LaunchEntry, ...] = ()
    discover: tuple[DiscoverEntry, ...] = ()
    routes: tuple[RouteEntry, ...] = ()
    control_routes: tuple[ControlRouteEntry, ...] = ()
    keys: tuple[CallerKey, ...] = ()
