"""The arguments of sglang-router, by the names and with the defaults of its `RouterArgs`.

Contract: names, order, types and defaults are those of sglang-router 0.3.2, so that code written
for it runs unchanged. `start_router` implements their effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from omni_proxy.compat.base_router_args import RouterArgsBase


@dataclass(init=False)
class SglangRouterArgs(RouterArgsBase):
    """`RouterArgs` of the package sglang_router."""

    dialect: ClassVar = "sglang"
    flag_defaults: ClassVar[Mapping[str, object]] = {
        "log_level": "info", "prometheus_host": "0.0.0.0", "prometheus_port": 29000,
    }  # fmt: skip

    worker_urls: list[str] = field(default_factory=list)
    host: str = "0.0.0.0"
    port: int = 30000
    mini_lb: bool = False
    pd_disaggregation: bool = False
    prefill_urls: list[tuple[str, int | None]] = field(default_factory=list)
    decode_urls: list[str] = field(default_factory=list)
    policy: str = "cache_aware"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    worker_startup_timeout_secs: int = 1800
    worker_startup_check_interval: int = 30
    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_secs: int = 60
    max_tree_size: int = 2**26
    max_idle_secs: int = 14400
    assignment_mode: str = "random"
    max_payload_size: int = 512 * 1024 * 1024
    bucket_adjust_interval_secs: int = 5
    dp_aware: bool = False
    enable_igw: bool = False
    api_key: str | None = field(default=None, repr=False)
    log_dir: str | None = None
    log_level: str | None = None
    service_discovery: bool = False
    selector: dict[str, str] = field(default_factory=dict)
    service_discovery_port: int = 80
    service_discovery_namespace: str | None = None
    prefill_selector: dict[str, str] = field(default_factory=dict)
    decode_selector: dict[str, str] = field(default_factory=dict)
    bootstrap_port_annotation: str = "sglang.ai/bootstrap-port"
    prometheus_port: int | None = None
    prometheus_host: str | None = None
    prometheus_duration_buckets: list[float] | None = None
    request_id_headers: list[str] | None = None
    request_timeout_secs: int = 1800
    shutdown_grace_period_secs: int = 180
    max_concurrent_requests: int = -1
    queue_size: int = 100
    queue_timeout_secs: int = 60
    rate_limit_tokens_per_second: int | None = None
    cors_allowed_origins: list[str] = field(default_factory=list)
    retry_max_retries: int = 5
    retry_initial_backoff_ms: int = 50
    retry_max_backoff_ms: int = 30000
    retry_backoff_multiplier: float = 1.5
    retry_jitter_factor: float = 0.2
    disable_retries: bool = False
    health_failure_threshold: int = 3
    health_success_threshold: int = 2
    health_check_timeout_secs: int = 5
    health_check_interval_secs: int = 60
    health_check_endpoint: str = "/health"
    disable_health_check: bool = False
    cb_failure_threshold: int = 10
    cb_success_threshold: int = 3
    cb_timeout_duration_secs: int = 60
    cb_window_duration_secs: int = 120
    disable_circuit_breaker: bool = False
    model_path: str | None = None
    tokenizer_path: str | None = None
    chat_template: str | None = None
    tokenizer_cache_enable_l0: bool = False
    tokenizer_cache_l0_max_entries: int = 10000
    tokenizer_cache_enable_l1: bool = False
    tokenizer_cache_l1_max_memory: int = 50 * 1024 * 1024
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    mcp_config_path: str | None = None
    backend: str = "sglang"
    history_backend: str = "memory"
    oracle_wallet_path: str | None = None
    oracle_tns_alias: str | None = None
    oracle_connect_descriptor: str | None = None
    oracle_username: str | None = None
    oracle_password: str | None = field(default=None, repr=False)
    oracle_pool_min: int = 1
    oracle_pool_max: int = 16
    oracle_pool_timeout_secs: int = 30
    postgres_db_url: str | None = None
    postgres_pool_max: int = 16
    redis_url: str | None = None
    redis_pool_max: int = 16
    redis_retention_days: int = 30
    client_cert_path: str | None = None
    client_key_path: str | None = None
    ca_cert_paths: list[str] = field(default_factory=list)
    server_cert_path: str | None = None
    server_key_path: str | None = None
    enable_trace: bool = False
    otlp_traces_endpoint: str = "localhost:4317"
    control_plane_api_keys: list[tuple[str, str, str, str]] = field(default_factory=list)
    control_plane_audit_enabled: bool = False
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_jwks_uri: str | None = None
    jwt_role_mapping: dict[str, str] = field(default_factory=dict)
