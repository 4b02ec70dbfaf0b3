"""The table `[routing]` with its policies, disaggregation and model aliases, and further routes:
`[[routes]]` and `[[control_routes]]`. Values only.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from omni_proxy.config.fields import (
    AtLeastOne,
    BodyKey,
    Capability,
    Count,
    Duration,
    Endpoint,
    Interval,
    Method,
    Name,
    OptionalWorkerUrl,
    PolicyName,
    PoolPolicyName,
    Ranks,
    RetryCause,
    SessionHeader,
    Size,
    Weight,
)


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
