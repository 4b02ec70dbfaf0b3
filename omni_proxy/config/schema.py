"""The configuration schema: every key, its type, its range and its default.

Values only: `parse` validates, a struct built by hand is not checked. Nothing here may read the
environment, the clock or a file. The comment above a key is its text in docs/configuration.md.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from omni_proxy.config.api_keys import CallerKey, KeySource
from omni_proxy.config.fields import (
    CAPABILITIES,
    DEFAULT_BOOTSTRAP_PORT,
    Address,
    AtLeastOne,
    BodyKey,
    BootstrapPort,
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


class TimeoutsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The timeouts of one exchange; 0 disables one."""

    # A worker in the same network answers a SYN in milliseconds: past this it is unreachable.
    connect_secs: Duration = 5.0
    # Request sent to response head. A unary response is computed before its head: minutes.
    response_head_secs: Duration = 600.0
    # Response head to first body byte: time to first token on a stream. Off: prefill has no bound.
    first_byte_secs: Duration = 0.0
    # Between two chunks of a body. Also ends a client that stopped reading.
    idle_secs: Duration = 300.0
    # Idle keep-alive connections. Above the usual 60 s of load balancers: those close them first.
    client_idle_secs: Duration = 75.0
    # From the first to the last byte of a head: ends a slow-head attack.
    client_head_secs: Duration = 10.0
    # A client that stops during its upload is disconnected after this.
    client_body_secs: Duration = 60.0


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Loopback unless the operator opens it.
    host: Host = "127.0.0.1"
    # 0: any free port, which is logged.
    port: Annotated[int, Meta(ge=0, le=65535)] = 30000
    # Permissions of the file of a Unix socket listener.
    unix_mode: Mode = "0660"
    # Data-plane processes that share the port; 0 is one per core.
    processes: Annotated[int, Meta(ge=0, le=1024)] = 1
    # Bytes of a request body; a larger one gets 413. Room for video in a JSON body.
    max_payload_size: Size = 512 * 1024 * 1024
    # Bytes of request bodies in memory at a time, except those that arrived with their head; above
    # it 503 with Retry-After.
    max_held_bytes: Size = 2 * 1024 * 1024 * 1024
    # A whole exchange that does not stream; 0 is none.
    request_timeout_secs: Duration = 1800.0
    # Requests in flight over the whole fleet; 0 is no limit; above it 503 with Retry-After.
    max_inflight: Count = 0
    # Requests above that limit, or without a routable worker, that wait instead of failing.
    queue_size: Count = 0
    # Longest wait in that queue.
    queue_timeout_secs: Duration = 30.0
    # A waiting request gains one priority of [[keys]] for each of these; 0: never.
    priority_aging_secs: Duration = 10.0
    # Status if a limit or the queue is full; with 429 a wait that was too long gets 408.
    overload_status: OverloadStatus = 503
    # A client's FIN before its response: `abort` frees the worker, `answer` serves clients that
    # half-close early.
    half_close: Literal["abort", "answer"] = "abort"
    # X-Forwarded-For, -Proto, -Host and Via: `append` trusts the received fields, `replace` drops
    # them, `off` passes them on and adds nothing.
    forwarded: Literal["append", "replace", "off"] = "off"
    # The field with a request's id, to the worker and back; generated if the client sends none.
    # Empty: received fields are passed on unchanged.
    request_id_header: HeaderName = ""
    # Fields with a request's id, the first present one, before X-Request-ID and X-Correlation-ID:
    # for logs and responses. The worker gets them unchanged.
    request_id_headers: tuple[HeaderToRead, ...] = ()
    # If set, model traffic needs it as a bearer token (or as X-Api-Key), and so do control routes
    # if no admin key is configured.
    api_key: str = ""
    # Every connection begins with the PROXY protocol, version 1 or 2; its address is the client's.
    proxy_protocol: bool = False
    # Seconds between comments to a client while its stream has not begun; 0: never.
    sse_keepalive_secs: Duration = 0.0
    # Browsers' origins that may call model routes and read open routes, without credentials; "*" is
    # any. They can never change anything.
    cors_allow_origins: tuple[WebOrigin, ...] = ("*",)
    drain_timeout_secs: Duration = 120.0  # after SIGTERM, for requests in flight
    upgrade_timeout_secs: Duration = 60.0  # for a new program to be ready, else the old goes on
    # For load balancers that poll /ready: it answers 503 for this long before draining begins.
    ready_off_secs: Duration = 0.0
    # The file for changes made over HTTP: `auto` is beside the configuration, `off` memory only.
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
    """The cache_aware policy: requests with a common prefix go to one worker."""

    # Least matching share of the text for the match to decide.
    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    # If the busiest and the idlest worker differ by more than both, load decides, not the cache.
    balance_abs_threshold: Count = 32
    balance_rel_threshold: Annotated[float, Meta(ge=1, le=1_000_000)] = 1.0001
    # Seconds between evictions.
    eviction_interval_secs: Interval = 60.0
    # In bytes that are kept of texts, for the whole fleet; what many workers hold counts once.
    max_tree_size: AtLeastOne = 16 * 1024 * 1024
    # The choice if no match is good enough.
    fallback: Literal["smallest_tree", "least_loaded"] = "smallest_tree"
    # If several have the match: the least loaded of them, or round robin whatever the load.
    holders: Literal["all", "longest"] = "all"
    # Overload of any worker: load decides for all; of the chosen one: its request goes elsewhere.
    spill: Literal["global", "chosen"] = "global"
    # Limit of what smallest_tree sends to a worker that is new; 0: no limit.
    warmup_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    # The longest match above cache_threshold, or the lowest cost in prompt tokens.
    score: Literal["match", "cost"] = "match"
    # Of the cost: the factor of tokens that only this worker computes, tokens for each in flight.
    uncached_weight: Annotated[float, Meta(ge=0, le=1_000)] = 2.0
    request_cost_tokens: Count = 512
    # Forget what a worker had less of its prompt than believed, by its answer's cached tokens.
    feedback: bool = True
    # What is cached where: inferred from what was sent, or by the engines' KV events.
    source: Literal["inferred", "events"] = "inferred"
    # With events: engines are asked for the tokens of long texts, beside the requests.
    tokenize: Literal["off", "engine"] = "off"
    # Blocks that engines reported as cached, over all workers; past it the oldest go.
    max_index_blocks: AtLeastOne = 4 * 1024 * 1024


class PrefixHashConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prefix_hash policy: the prefix of the text alone determines the worker."""

    # Length of the prefix in bytes of UTF-8. Shorter: more requests share a worker.
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
    # If the decode worker has to compute fewer tokens than this, it computes the prompt itself; 0:
    # always two legs.
    min_uncached_tokens: Count = 0
    # Longest silence of both legs before the first byte; 0: only response_head_secs.
    transfer_timeout_secs: Duration = 30.0
    # Without a prefill worker, or if it failed: the decode worker computes the prompt (never with
    # kv_connector sglang, whose engines can't), or 503.
    fallback: Literal["decode", "refuse"] = "decode"


class AliasTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # The model of some workers.
    model: Name
    # Share of the alias's requests relative to its other targets.
    weight: Weight = 1


class ModelAlias(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An alias: requests for its name go to workers of other models, by weight."""

    # What requests name.
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
    # Causes for a retry. Never after a byte was relayed. A 500 counts as a failed attempt if it is
    # named here; 502 and 504 always do, the others never.
    retry_on: tuple[RetryCause, ...] = ("connect_failure", "reset_before_response", "503")
    # A larger body is sent once: keeping it for a retry would cost too much memory.
    retry_body_bytes: Size = 8 * 1024 * 1024
    # After pause_generation: let workers queue, hold here, or refuse.
    while_paused: Literal["pass", "hold", "shed"] = "pass"
    # State of an ejected worker: returns by a good probe, returns by an operator, or removed.
    eject: Literal["unhealthy", "dead", "remove"] = "unhealthy"
    # true: requests with the same key (a header) stay with one worker, under any policy.
    sticky_sessions: bool = False
    # A session that was idle for this long is dropped; 0: never.
    sticky_idle_secs: Duration = 14400.0
    # Most sessions; above it the longest idle one is dropped.
    sticky_max: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    # The first worker of a session: the policy's, or that with the fewest live sessions.
    sticky_load: Literal["requests", "sessions"] = "requests"
    # A session is pinned anew once its worker has so many requests in flight more than the idlest
    # one ... 0: never.
    sticky_rebalance_abs: Count = 0
    # ... and so many times as many.
    sticky_rebalance_rel: Annotated[float, Meta(ge=1, le=1_000_000)] = 1.5
    # A worker whose engine reports so many waiting ones gets none while another is below; 0: never.
    overload_waiting: Count = 0
    # The same for the share of its KV cache in use, 0 to 1; 0: never.
    overload_kv_usage: Annotated[float, Meta(ge=0, le=1)] = 0.0
    # What an engine reported longer ago counts for nothing.
    load_max_age_secs: Interval = 5.0
    # Engines are asked for their load this often; 0: never.
    load_poll_secs: Duration = 0.0
    # The first of these headers that a request has is its session.
    session_headers: tuple[SessionHeader, ...] = (
        "x-smg-routing-key", "x-session-id", "x-claude-code-session-id", "session-id",
        "authorization", "x-forwarded-for", "cookie",
    )  # fmt: skip
    # Then the first of these keys of a JSON body; a dot leads into an object.
    session_body_keys: tuple[BodyKey, ...] = ()
    cache_aware: CacheAwareConfig = CacheAwareConfig()
    prefix_hash: PrefixHashConfig = PrefixHashConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    models: tuple[ModelAlias, ...] = ()


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A path on the worker; 200 is good.
    endpoint: Endpoint = "/health"
    # Between two probes of one worker; of one that is out at most 10 s.
    interval_secs: Interval = 10.0
    # Of one probe.
    timeout_secs: Interval = 5.0
    # Failed probes in a row until a worker leaves rotation.
    failure_threshold: AtLeastOne = 3
    # Good probes in a row until it returns.
    success_threshold: AtLeastOne = 2
    # `unhealthy` recovers by good probes; `dead` waits for an operator (or the launcher that
    # restarted it).
    on_threshold: Literal["dead", "unhealthy"] = "unhealthy"
    # false: a worker in rotation is not probed, so only failed requests eject it; one that is new,
    # or out, is probed until it is healthy.
    probe_healthy: bool = True
    # A worker that was never healthy for this long after it was added is reported as failed; 0:
    # never. It is still probed, and gets requests once it is healthy.
    startup_timeout_secs: Duration = 0.0


AdminRole: TypeAlias = Literal["read", "operate", "weights", "all"]


class AdminKey(KeySource, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further admin key, with a role. With one of these, control routes need a key."""

    # What it may do: `read` shows everything; `operate` also changes workers and reloads; `weights`
    # also updates weights and pauses; `all` does everything.
    role: AdminRole = "read"


class AdminConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Bytes of a control request; above it 413.
    max_body_bytes: Size = 64 * 1024 * 1024
    # true: /metrics answers without the key.
    open_metrics: bool = False
    # If set, changes need it as a bearer token; it may do everything. If it is empty and there are
    # no [[admin.keys]]: [server] api_key.
    api_key: str = ""
    # "host:port" or "unix:PATH": control routes answer there only.
    listen: Listen = ""
    # "host:port" or "unix:PATH": serves GET /metrics without a key, and nothing else.
    metrics_listen: Listen = ""
    # false: the admin listener requires no key.
    listen_key: bool = True
    # Host names under which control routes answer without a key, besides addresses and localhost:
    # any other name may be a foreign one that resolves to this address (DNS rebinding).
    allowed_hosts: tuple[HostName, ...] = ()
    # `off`, `-` for stdout, or a path: one JSON line for each call that changes something, refused
    # ones included.
    audit_log: LogTarget = "off"
    # One weight update at a time: the next one waits this long, then 503.
    lock_timeout_secs: Duration = 300.0
    # For a single worker to answer a control call.
    worker_timeout_secs: Duration = 600.0
    keys: tuple[AdminKey, ...] = ()


class ObserveConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Traces: spans are sent there by OTLP over HTTP, to its /v1/traces; needs the extra `otel`.
    # Empty: none are made.
    otlp_endpoint: OtlpEndpoint = ""
    # Share of the traces that begin here and are sent; the decision of a client that sends a
    # traceparent holds.
    trace_sampling: Annotated[float, Meta(ge=0, le=1)] = 1.0


class WeightSyncConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Members of the trainer's process group: every worker by a plain broadcast (off), every worker
    # with its own ranks (coordinate), the proxy for all of them (receive), or either (both).
    mode: Literal["coordinate", "receive", "both", "off"] = "coordinate"
    # auto: the trainer's choice.
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    # The receive blocks in foreign code: in a process of its own it can be killed.
    isolation: Literal["process", "thread"] = "process"
    # Until every rank joined.
    init_timeout_secs: Duration = 1800.0
    # Until every rank is armed.
    ready_timeout_secs: Duration = 60.0
    # From complete to the last bucket.
    receive_timeout_secs: Duration = 300.0
    # A transfer without progress for this long is aborted.
    stall_timeout_secs: Duration = 30.0
    # Folder of received versions; empty puts it next to the state file.
    store_dir: str = ""
    keep_versions: AtLeastOne = 2
    # Whether replicas must agree on a digest before they serve again.
    verify: Literal["checksum", "off"] = "checksum"
    # After a partial failure: keep the failed workers out, roll back everywhere, or repair them.
    on_failure: Literal["quarantine", "rollback", "forward"] = "quarantine"
    # Grace for running requests before their worker is paused or updated.
    drain_secs: Duration = 0.0
    # And for requests that arrive during it.
    while_updating: Literal["hold", "shed", "pass"] = "hold"


class WorkerEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Base URL, normalized by `parse`; or unix:PATH.
    url: WorkerUrl
    # Empty: routing.model, and if that is empty too, any model.
    model: str = ""
    capabilities: Capabilities = CAPABILITIES
    # true: no new requests; still probed.
    disabled: bool = False
    # Share of requests relative to the others.
    weight: Weight = 1
    # Requests in flight on this worker; 0: no limit.
    max_inflight: Count = 0
    # Environment variable with the bearer key for this worker. A name, so that FILE holds no key.
    api_key_env: str = ""
    # Empty: as its /server_info reports, regular if it reports none.
    role: Literal["", "regular", "prefill", "decode"] = ""
    # How KV caches pass between prefill and decode workers; a pair has the same one. Empty: sglang.
    kv_connector: Literal["", "sglang", "nixl", "mooncake"] = ""
    # Of prefill workers of sglang and mooncake; 0: as its /server_info reports.
    bootstrap_port: BootstrapPort = DEFAULT_BOOTSTRAP_PORT
    # Data-parallel ranks behind this URL; 0: routing.ranks; above 1 each is picked and counted
    # separately; "auto":
    # as the engine reports.
    ranks: WorkerRanks = 0
    # Adapters that requests may name as their model; "auto": those of its /v1/models.
    loras: Loras = ()
    # Where its engine publishes KV events: "tcp://host:port" (data-parallel rank r: port + r; with
    # the host * the engine connects to us), "auto": as the engine reports.
    kv_events: KvEvents = "off"
    # Where missed batches of them can be asked for again, "tcp://host:port"; empty: nowhere.
    kv_replay: KvReplay = ""
    # For https: PEM file of its CAs; empty: server.tls_worker_ca.
    tls_ca: str = ""
    # false: its certificate is not verified: any host at its address gets its requests and key.
    tls_verify: bool = True


class LaunchEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of replicas that the proxy starts, watches, restarts and stops."""

    name: Name = "local"
    # {host} and {port} are substituted for each replica; {5557+index} is 5557 for the first, the
    # next number for each next one.
    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    replicas: Annotated[int, Meta(ge=0, le=1024)] = 1
    host: Address = "127.0.0.1"
    # Replica i listens on base_port + i.
    base_port: Port = 31000
    # Above 0 each replica gets its own slice of the GPUs in CUDA_VISIBLE_DEVICES.
    gpus_per_replica: Count = 0
    # Loading weights takes minutes; after this the start counts as failed.
    ready_timeout_secs: Duration = 300.0
    restart: Literal["on_failure", "never"] = "on_failure"
    capabilities: Capabilities = CAPABILITIES
    # Empty: as for a worker.
    model: str = ""
    # As for a worker. Replica i has bootstrap port base_bootstrap_port + i, as {bootstrap_port} in
    # the command and in env.
    role: Literal["", "regular", "prefill", "decode"] = ""
    kv_connector: Literal["", "sglang", "nixl", "mooncake"] = ""
    base_bootstrap_port: Port = DEFAULT_BOOTSTRAP_PORT
    # "auto": their engines publish KV events, where they report it; as for a worker.
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

    # Exact; not a built-in route.
    path: Endpoint
    methods: Annotated[tuple[Method, ...], Meta(min_length=1)] = ("POST",)
    # The capabilities that a worker needs for it.
    capability: Capability = "chat"
    # Keys of the body, dotted for nested ones, whose content is the text for prefix matching.
    # Lists, token ids, messages and parts with a text are read.
    text: tuple[Name, ...] = ()


class ControlRouteEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further control route, sent to every worker."""

    # Exact; not a built-in route.
    path: Endpoint
    # As for built-in routes: the operation lock, workers out of rotation, the journal.
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
