"""The flags of sglang-router, smg and vllm-router that differ from ours.

Contract: a command line that works there starts here as well, unless it needs an unsupported
feature. A flag with a matching key sets it; a flag that has no meaning here is accepted with one
warning; a flag that would change which worker serves a request is refused. A refusal names the
replacement: the nearest flag, or the one with another name; docs/migration.md has the same texts.
Source: `RouterArgs` of sglang-router 0.3.2 and smg 1.13, vllm-router 0.1.17 --help.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PAGE: Final = "docs/migration.md"
# In a namespace: before the key of a flag in `SWITCHES`, and before a flag in `JOINED`.
_SWITCHED: Final = "switch:"
_JOINED: Final = "joined:"

# Set a key of ours, with the value that follows.
VALUED: Final = {
    "--api-key": "server.api_key",
    "--intra-node-data-parallel-size": "routing.ranks",
    "--header-read-timeout-secs": "server.timeouts.client_head_secs",
    "--idle-connection-timeout-secs": "server.timeouts.client_idle_secs",
    "--max-idle-secs": "routing.sticky_idle_secs",
    "--prefix-hash-load-factor": "routing.prefix_hash.load_factor",
    "--shutdown-grace-period-secs": "server.drain_timeout_secs",
    "--sse-keepalive-secs": "server.sse_keepalive_secs",
    "--sticky-key-idle-secs": "routing.sticky_idle_secs",
    "--stream-body-stall-timeout-secs": "server.timeouts.idle_secs",
    "--worker-startup-timeout-secs": "health.startup_timeout_secs",
}
# Set a list of ours, to all values that follow.
LISTS: Final = {
    "--cors-allowed-origins": "server.cors_allow_origins",
    "--request-id-headers": "server.request_id_headers",
    "--routing-key-headers": "routing.session_headers",
}
# Flags that set a key together with another flag; see `_joined`.
JOINED: Final = {
    "--log-dir": "server.log_file",
    "--prometheus-host": "admin.metrics_listen",
    "--prometheus-port": "admin.metrics_listen",
}
# Engines have them, too: beside one they are the router's only under its prefix.
_ALSO_ENGINE_FLAGS: Final = frozenset(("--api-key", "--log-dir"))
PROMETHEUS: Final = ("127.0.0.1", "29000")  # if one of host and port is not given
LOG_FILE: Final = "omni-proxy.log"
# Set a key of ours to this value.
SWITCHES: Final[dict[str, tuple[str, object]]] = {
    "--disable-circuit-breaker": ("routing.max_worker_retries", 0),
    "--disable-health-check": ("health.probe_healthy", False),
    "--disable-retries": ("routing.max_total_retries", 1),
    "--dp-aware": ("routing.ranks", "auto"),
    "--log-json": ("server.log_format", "json"),
    "--routing-key-override": ("routing.sticky_sessions", True),
    "--sticky-sessions": ("routing.sticky_sessions", True),
}

_Names = tuple[str, ...]
# Why a setting has no effect here; names that take no value, one, and any number of values.
_TUNING: Final[tuple[tuple[str, _Names, _Names, _Names], ...]] = (
    (
        "a retry on another worker is immediate; on the same workers it waits 50 ms, doubling "
        "to 1 s",
        (),
        (
            "--retry-initial-backoff-ms", "--retry-max-backoff-ms", "--retry-backoff-multiplier",
            "--retry-jitter-factor",
        ),
        (),
    ),
    (
        "an ejected worker is probed immediately, and one half-open request brings it back",
        (),
        ("--cb-success-threshold", "--cb-timeout-duration-secs", "--cb-window-duration-secs"),
        (),
    ),
    (
        "a starting worker gets requests as soon as its probes succeed",
        (),
        (
            "--worker-startup-check-interval", "--worker-startup-delay",
        ),
        (),
    ),
    (
        "--max-concurrent-requests bounds requests in flight; requests_per_minute of [[keys]] "
        "bounds the rate of a caller",
        (),
        ("--rate-limit-tokens-per-second",),
        (),
    ),
    (
        "an unhealthy worker is probed at --health-check-endpoint until probes succeed",
        (
            "--remove-unhealthy-workers", "--no-remove-unhealthy-workers",
            "--worker-auto-recovery", "--no-worker-auto-recovery",
        ),
        ("--worker-stall-secs", "--worker-wedge-secs", "--worker-stale-secs"),
        (),
    ),
    ("requests are always routed by their model", ("--enable-igw",), (), ()),
    (
        "/v1/rl is always served; [admin] worker_timeout_secs bounds a call",
        ("--enable-rl",),
        ("--rl-control-timeout-secs", "--rl-fanout-concurrency"),
        (),
    ),
    (
        "prompts are compared as text, and the engines tokenize, template and parse",
        (
            "--disable-tokenizer-autoload", "--tokenizer-cache-enable-l0",
            "--tokenizer-cache-enable-l1",
        ),
        (
            "--model-path", "--tokenizer-path", "--chat-template", "--reasoning-parser",
            "--tool-call-parser", "--parser", "--tokenizer-cache-l0-max-entries",
            "--tokenizer-cache-l0-max-memory", "--tokenizer-cache-l1-max-memory",
            "--prefix-token-count", "--block-size",
        ),
        (),
    ),
    (
        "load is the number of requests in flight; load_poll_secs, overload_waiting and "
        "overload_kv_usage of [routing] add what engines report",
        (
            "--disable-load-monitoring", "--worker-overload-protection",
            "--disable-worker-overload-protection", "--worker-overload-shed",
        ),
        (
            "--load-monitor-interval", "--power-of-two-load-metric",
            "--least-load-kv-pressure-weight", "--least-load-default-throughput",
            "--least-load-mean-prefill-tokens", "--least-load-max-waiting-requests",
            "--balance-token-usage-threshold", "--overload-token-usage-threshold",
            "--worker-overload-waiting-requests", "--worker-overload-token-usage",
            "--prefix-hash-balance-abs-threshold",
        ),
        (),
    ),
    (
        "the policy has no such setting; [routing.cache_aware] has all of its settings",
        (),
        (
            "--assignment-mode", "--bucket-adjust-interval-secs", "--cache-index",
            "--cache-ttl-secs", "--kv-index", "--overlap-decay", "--selection-policy",
            "--selection-temperature", "--selection-accounting-ttl-ms", "--worker-warmup-secs",
            "--worker-warmup-share", "--worker-warmup-blocks", "--worker-warmup-thin-ratio",
            "--worker-warmup-divert-every",
        ),
        ("--cache-boundaries",),
    ),
    (
        "upstream connections are HTTP/1.1 and kept for 30 s",
        ("--upstream-http2",),
        ("--upstream-pool-idle-timeout-secs", "--max-buffered-request-bytes"),
        (),
    ),
    ("the buckets of /metrics are fixed", (), (), ("--prometheus-duration-buckets",)),
    (
        "there are no such queues here",
        (),
        ("--job-queue-capacity", "--job-queue-concurrency", "--max-background-responses"),
        (),
    ),
)  # fmt: skip
WITHOUT_EFFECT: Final[dict[str, tuple[str, str | int | None]]] = {
    name: (reason, nargs)
    for reason, *by_nargs in _TUNING
    for names, nargs in zip(by_nargs, (0, None, "*"), strict=True)
    for name in names
}

# Features that do not exist here, by flag; a name that ends with "-" is a prefix of flags.
_MISSING: Final[tuple[tuple[str, _Names], ...]] = (
    (
        "separate encoder workers are not supported; use workers that encode, too",
        ("--epd-disaggregation", "--encode", "--encode-"),
    ),
    (
        "a policy picks prefill and decode workers: use --pd-disaggregation without it",
        ("--mini-lb",),
    ),
    (
        "engines don't register over ZMQ; let them register by POST /workers with worker_type "
        "prefill or decode, or name them by --prefill and --decode",
        ("--vllm-discovery-address",),
    ),
    (
        "max_inflight of [[workers]] bounds a prefill worker, queue_size and queue_timeout_secs of "
        "[server] the wait for a pair",
        ("--pd-admission-", "--prefill-max-", "--prefill-queue-"),
    ),
    (
        "replicas that launch starts are its workers; pods of Kubernetes are found by omni-proxy "
        "launch-router with these flags, or by [[discover]] in a file",
        ("--router-service-discovery", "--router-service-discovery-", "--router-selector"),
    ),
    (
        "discovery files are not watched; write [[workers]] into a file that is read as it "
        "changes, or find pods by --service-discovery",
        ("--discovery-",),
    ),
    (
        "pod annotations have other names here, which docs/discovery.md lists",
        ("--kv-connector-", "--kv-engine-id-"),
    ),
    (
        "the policy picks among data-parallel ranks by requests in flight, which --policy "
        "least_request compares; tokens are not counted",
        ("--dp-minimum-",),
    ),
    (
        "responses and conversations are kept by the engines, if they keep them",
        (
            "--history-", "--oracle-", "--postgres-", "--redis-", "--schema-config",
            "--storage-",
        ),
    ),
    ("tools are not called here; the client calls them", ("--mcp-",)),
    ("no middleware runs here; put it into a gateway in front", ("--enable-wasm", "--wasm-")),
    (
        "proxies share state through Valkey or Redis: [cluster] of a configuration file",
        ("--enable-mesh", "--mesh-"),
    ),
    (
        "[[keys]] of a configuration file has callers with keys and limits; --api-key is one "
        "key for all, --admin-api-key protects changes",
        ("--control-plane-", "--jwt-", "--tenant-", "--trust-tenant-header"),
    ),
    (
        "[observe] otlp_endpoint of a configuration file sends spans by OTLP over HTTP",
        ("--enable-trace", "--otlp-"),
    ),
    (
        "priority of [[keys]] orders waiting requests of different callers; those of equal "
        "priority keep their order of arrival",
        ("--priority-scheduler-", "--enable-program-scheduling", "--program-scheduling-"),
    ),
    (
        'source = "events" of [routing.cache_aware] follows the KV events of engines; it has no '
        'such parameters',
        (
            "--kv-penalty-", "--kv-aware-", "--kv-event-", "--pd-kv-events",
            "--router-temperature",
        ),
    ),
    (
        "workers use HTTP only, and media are forwarded unchanged",
        ("--multimodal-", "--mm-", "--rdma-", "--log-mm-timing", "--zmq-"),
    ),
    ("GET /live and /ready answer on the port that serves", ("--health-check-port",)),
    ("[[routing.models]] of a configuration file has aliases", ("--model-alias",)),
    (
        "no client certificate is sent to workers; api_key_env in [[workers]] names a key for them",
        ("--client-cert-path", "--client-key-path"),
    ),
    ("memory is not profiled here", ("--jemalloc-",)),
)  # fmt: skip
MISSING: Final = {name: why for why, names in _MISSING for name in names}


class _NoEffect(argparse.Action):
    """Records that the flag was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        noted: dict[str, None] = getattr(namespace, "without_effect", {})
        namespace.without_effect = noted | {option_string or "": None}


def add_mapped_flags(parser: argparse.ArgumentParser, prefix: str) -> None:
    """Flags that set a configuration key; `prefix` if an engine may have the same ones, else "".

    A flag that the parser has already keeps its meaning there.
    """

    def add(flag: str, **how: Any) -> None:
        taken = parser._option_string_actions
        names = [name for name in _named(flag, prefix) if name not in taken]
        if names:
            parser.add_argument(*names, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)

    for flag, key in VALUED.items():
        add(flag, dest=key)
    for flag in JOINED:
        add(flag, dest=_JOINED + flag)
    for flag, key in LISTS.items():
        add(flag, dest=key, nargs="*")
    for flag, (key, value) in SWITCHES.items():
        add(flag, dest=_SWITCHED + key, action="store_const", const=value)


def overrides(arguments: argparse.Namespace) -> dict[str, object]:
    """The configuration keys set by flags; a switch wins over a value for the same key."""
    values = vars(arguments).items()
    joined = {
        name.removeprefix(_JOINED): str(value) for name, value in values if name.startswith(_JOINED)
    }
    switched = {
        name.removeprefix(_SWITCHED): value for name, value in values if name.startswith(_SWITCHED)
    }
    return {name: value for name, value in values if _is_key(name)} | _joined(joined) | switched


def _is_key(name: str) -> bool:
    return "." in name and ":" not in name


def _joined(given: Mapping[str, str]) -> dict[str, object]:
    """Configuration keys that several flags set, or one flag in another form."""
    keys: dict[str, object] = {}
    if folder := given.get("--log-dir"):
        keys["server.log_file"] = str(Path(folder) / LOG_FILE)
    if "--prometheus-host" in given or "--prometheus-port" in given:
        host = given.get("--prometheus-host", PROMETHEUS[0])
        port = given.get("--prometheus-port", PROMETHEUS[1])
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        keys["admin.metrics_listen"] = f"{host}:{port}"
    return keys


def add_ignored_flags(parser: argparse.ArgumentParser, prefix: str) -> None:
    """Flags that are accepted and have no effect; with a prefix only under it: without one they are
    the engine's."""
    taken = set(parser._option_string_actions)
    for flag, (_, nargs) in WITHOUT_EFFECT.items():
        name = prefix + flag.removeprefix("--") if prefix else flag
        if name not in taken:
            parser.add_argument(
                name, dest="without_effect", action=_NoEffect, nargs=nargs,
                default=argparse.SUPPRESS, help=argparse.SUPPRESS,
            )  # fmt: skip


def _named(flag: str, prefix: str) -> list[str]:
    if not prefix:
        return [flag]
    prefixed = prefix + flag.removeprefix("--")
    return [prefixed] if flag in _ALSO_ENGINE_FLAGS else [flag, prefixed]


def warnings(arguments: argparse.Namespace) -> tuple[str, ...]:
    """One for each accepted flag without effect."""
    noted: Iterable[str] = getattr(arguments, "without_effect", {})
    return tuple(
        f"{flag} has no effect here: {WITHOUT_EFFECT[strip_router_prefix(flag)][0]} ({PAGE})"
        for flag in noted
    )


def strip_router_prefix(flag: str) -> str:
    """The flag of the router itself, if the launcher has it under a prefix."""
    unprefixed = flag.replace("--router-", "--", 1)
    return flag if flag in MISSING or unprefixed == flag else unprefixed


def explain_missing_flag(flag: str) -> str:
    """Why the flag is refused, and what to use instead; "" if the peers don't have it."""
    flag = strip_router_prefix(flag)
    if flag in MISSING:
        return MISSING[flag]
    families = (name for name in MISSING if name.endswith("-") and flag.startswith(name))
    return next((MISSING[name] for name in families), "")


def router_flags_in(args: Sequence[str]) -> list[str]:
    """The arguments for an engine that by their names are flags of the router.

    `args` are those before a bare `--`: whatever follows is the engine's.
    """
    flags = (arg for arg in args if arg.startswith("--"))
    return [flag for flag in flags if flag.startswith("--router-") or _name(flag) == "--backend"]


def _name(arg: str) -> str:
    return arg.partition("=")[0]
