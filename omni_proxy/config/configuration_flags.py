"""Configuration from the command line on top of FILE: single keys, worker URLs, the admin key.

`FLAGS` is the only list of flags that set a key. `cli.flags.start_parsers` makes a parser of it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from omni_proxy.config.problem import ConfigError, Problem, format_path, to_toml_literal
from omni_proxy.config.schema import Config, LaunchEntry, WorkerEntry
from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.config.url import normalize_url, split_rank
from omni_proxy.config.validate import check_rules, walk
from omni_proxy.shared.engine_protocol import KvConnector

FLAGS: Final = {
    "--host": "server.host",
    "--port": "server.port",
    "--policy": "routing.policy",
    "--prefill-policy": "routing.disaggregation.prefill_policy",
    "--decode-policy": "routing.disaggregation.decode_policy",
    "--model": "routing.model",
    "--max-worker-retries": "routing.max_worker_retries",
    "--max-total-retries": "routing.max_total_retries",
    "--cache-threshold": "routing.cache_aware.cache_threshold",
    "--balance-abs-threshold": "routing.cache_aware.balance_abs_threshold",
    "--balance-rel-threshold": "routing.cache_aware.balance_rel_threshold",
    "--eviction-interval": "routing.cache_aware.eviction_interval_secs",
    "--max-tree-size": "routing.cache_aware.max_tree_size",
    "--request-timeout-secs": "server.request_timeout_secs",
    "--max-inflight": "server.max_inflight",
    "--queue-size": "server.queue_size",
    "--queue-timeout-secs": "server.queue_timeout_secs",
    "--max-payload-size": "server.max_payload_size",
    "--health-failure-threshold": "health.failure_threshold",
    "--health-success-threshold": "health.success_threshold",
    "--health-check-timeout-secs": "health.timeout_secs",
    "--health-check-interval-secs": "health.interval_secs",
    "--health-check-endpoint": "health.endpoint",
    "--admin-api-key": "admin.api_key",
    "--log-level": "server.log_level",
    "--tls-cert": "server.tls_cert",
    "--tls-key": "server.tls_key",
}
# Names of the same flags in later routers.
FLAG_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "--max-worker-retries": ("--cb-failure-threshold",),
    "--max-total-retries": ("--retry-max-retries",),
    "--max-inflight": ("--max-concurrent-requests",),
    "--cache-threshold": ("--cache-match-threshold",),
    "--eviction-interval": ("--eviction-interval-secs",),
    "--tls-cert": ("--tls-cert-path",),
    "--tls-key": ("--tls-key-path",),
}
# Policy names of other routers, and the policies that replace them here.
_POLICY_EQUIVALENT: Final = {
    "consistent_hash": "consistent_hashing",
    "least_load": "least_request",
    "manual": "least_request",
    "passthrough": "round_robin",
    "session_aware": "least_request",
    "sticky_least_loaded": "least_request",
}
_POLICY_KEYS: Final = (
    "routing.policy",
    "routing.disaggregation.prefill_policy",
    "routing.disaggregation.decode_policy",
)
_EQUIVALENT: Final = {
    ("server.log_level", "warn"): "warning",
    ("server.max_inflight", "-1"): "0",
    **{(key, theirs): ours for key in _POLICY_KEYS for theirs, ours in _POLICY_EQUIVALENT.items()},
}
# Further keys that such a policy name sets, unless the command line sets them.
_SESSIONS: Final[dict[str, object]] = {"routing.sticky_sessions": True}
_POLICY_IMPLIED: Final[dict[str, dict[str, object]]] = {
    "manual": _SESSIONS,
    "session_aware": _SESSIONS,
    "sticky_least_loaded": {**_SESSIONS, "routing.sticky_load": "sessions"},
}
_IMPLIED: Final = {
    (key, theirs): keys for key in _POLICY_KEYS for theirs, keys in _POLICY_IMPLIED.items()
}
_FLAG_OF: Final = {key: flag for flag, key in FLAGS.items()}
_PLACE: Final = "command line"


# The router whose behaviour applies where they differ: SGLang-Omni's; sglang-router and smg; or
# vllm-router, which differs from these in a few responses.
Dialect: TypeAlias = Literal["omni", "sglang", "vllm"]


@dataclass(frozen=True, slots=True)
class Startup:
    """The command line of one program start; it overrides FILE at every reload, too."""

    config_path: Path | None
    overrides: dict[str, object]
    flag_urls: tuple[str, ...]
    # From the environment: used only if neither a flag nor FILE sets an admin key.
    admin_key: str
    # Replicas of the command line, in addition to those of FILE.
    launch: tuple[LaunchEntry, ...] = ()
    dialect: Dialect = "omni"
    pool_workers: tuple[WorkerEntry, ...] = ()  # from --prefill and --decode
    discover: tuple[DiscoverEntry, ...] = ()  # from --service-discovery
    kv_connector: KvConnector = "sglang"  # of prefill and decode workers that name none
    # `omni-proxy picker`: model requests are not relayed.
    picker: bool = False
    # Messages to log about flags without effect.
    warnings: tuple[str, ...] = ()

    @property
    def flag_workers(self) -> tuple[str | WorkerEntry, ...]:
        """All workers of the command line; a plain URL is a worker without further settings."""
        return (*self.flag_urls, *self.pool_workers)

    @property
    def given_urls(self) -> tuple[str, ...]:
        return (*self.flag_urls, *(worker.url for worker in self.pool_workers))

    def effective_config(self, config: Config) -> Config:
        """FILE's `config`, overridden by the command line. Raises ConfigError."""
        if self.launch:
            config = msgspec.structs.replace(config, launch=(*config.launch, *self.launch))
        if self.discover:
            entries = (*config.discover, *self.discover)
            config = msgspec.structs.replace(config, discover=entries)
        config = apply_flags(config, self.overrides)
        if config.admin.api_key or not self.admin_key:
            return config
        return apply_flags(config, {"admin.api_key": self.admin_key})


def apply_flags(config: Config, overrides: Mapping[str, object]) -> Config:
    """`overrides` maps key paths to values; a number may be the text as typed.

    Raises ConfigError that names the flag of each invalid value.
    """
    tables = msgspec.to_builtins(config)
    words = [(key, typed) for key, typed in overrides.items() if isinstance(typed, str)]
    also = {key: value for word in words for key, value in _IMPLIED.get(word, {}).items()}
    for key, typed in (also | dict(overrides)).items():
        value = _EQUIVALENT.get((key, typed), typed) if isinstance(typed, str) else typed
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table[section]
        table[name] = _number(value) if isinstance(table[name], int | float) else value
    values, findings = walk(tables, Config)
    findings += check_rules(values)
    if findings:
        raise flag_error([(format_path(path), reason, hint) for path, reason, hint in findings])
    return msgspec.convert(values, Config)


def parse_worker_urls(texts: Iterable[str]) -> tuple[str, ...]:
    """The normalized URLs of --worker-urls; a URL with several ranks appears once.

    Raises ConfigError.
    """
    ranks: dict[str, list[int]] = {}
    findings = []
    for text in texts:
        bare, rank = split_rank(text)
        try:
            url = normalize_url(bare, allow_unix=False)
            known = ranks.get(url)
            named_twice = known is not None and (rank is None or rank in known or not known)
            reason = "is named twice" if named_twice else ""
        except ValueError as error:
            url, reason = text, str(error)
        if reason:
            findings.append(("--worker-urls", f"{to_toml_literal(text)}: {reason}", ""))
        ranks.setdefault(url, []).extend([] if rank is None else [rank])
    if findings:
        raise flag_error(findings)
    return tuple(ranks)


def ranks_in_urls(texts: Iterable[str]) -> int | None:
    """Number of ranks of each worker if --worker-urls names them as `URL@RANK`, else None.

    `texts` are valid. Raises ConfigError unless each URL is named with all of the ranks.
    """
    ranks_by_url: dict[str, set[int]] = {}
    for text in texts:
        url, rank = split_rank(text)
        ranks_by_url.setdefault(normalize_url(url, allow_unix=False), set()).update(
            () if rank is None else (rank,)
        )
    if not any(ranks_by_url.values()):
        return None
    count = max(map(len, ranks_by_url.values()))
    for url, ranks in ranks_by_url.items():
        if ranks != set(range(count)):
            reason = f"{to_toml_literal(url)}: ranks 0 to {count - 1} are not all named"
            hint = "name each URL with all its ranks; or once, with `ranks` in [[workers]]"
            raise flag_error([("--worker-urls", reason, hint)])
    return count


def _number(value: object) -> object:
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def flag_error(findings: Iterable[tuple[str, str, str]]) -> ConfigError:
    """Each finding: the flag, or the key that it sets; the reason; a hint or ""."""
    return ConfigError(
        [
            Problem(_FLAG_OF.get(path, path), None, reason, hint, _PLACE)
            for path, reason, hint in findings
        ],
        _PLACE,
    )
