"""The arguments of vllm-router, by the names and with the defaults of its `RouterArgs`.

Contract: names, order, types and defaults are those of vllm-router 0.1.17, so that code written for
it runs unchanged; plus `pd_disaggregation`, which vllm-router lacks and SkyRL reads.
`start_router` implements their effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from omni_proxy.compat.base_router_args import RouterArgsBase


@dataclass(init=False)
class VllmRouterArgs(RouterArgsBase):
    """`RouterArgs` of the package vllm_router."""

    dialect: ClassVar = "vllm"
    flag_defaults: ClassVar[Mapping[str, object]] = {
        "log_level": "info", "prometheus_host": "127.0.0.1", "prometheus_port": 29000,
    }  # fmt: skip

    worker_urls: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 30000
    mini_lb: bool = False
    vllm_pd_disaggregation: bool = False
    prefill_urls: list[tuple[str, int | None]] = field(default_factory=list)
    decode_urls: list[str] = field(default_factory=list)
    pd_kv_events: list[str] = field(default_factory=list)
    policy: str = "cache_aware"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    router_temperature: float = 0.0
    kv_penalty_host: float = 0.8
    kv_penalty_external: float = 0.6
    kv_penalty_disk: float = 0.3
    kv_aware_session_affinity_ttl_secs: int | None = None
    kv_event_source: list[str] = field(default_factory=list)
    kv_event_replay_source: list[str] = field(default_factory=list)
    kv_event_block_size: int = 16
    kv_event_model: str | None = None
    worker_startup_timeout_secs: int = 600
    worker_startup_check_interval: int = 30
    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_secs: int = 120
    max_tree_size: int = 2**25
    max_payload_size: int = 512 * 1024 * 1024
    wasm_middleware: str | None = None
    wasm_middleware_sha256: str | None = None
    wasm_middleware_routes: list[str] = field(default_factory=list)
    intra_node_data_parallel_size: int = 1
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
    bootstrap_port_annotation: str = "vllm.ai/bootstrap-port"
    vllm_discovery_address: str | None = None
    kv_connector: str = "nixl"
    enable_program_scheduling: bool = False
    program_scheduling_config_json: str | None = None
    prometheus_port: int | None = None
    prometheus_host: str | None = None
    request_id_headers: list[str] | None = None
    request_timeout_secs: int = 1800
    max_concurrent_requests: int = 32768
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
    cb_failure_threshold: int = 10
    cb_success_threshold: int = 3
    cb_timeout_duration_secs: int = 60
    cb_window_duration_secs: int = 120
    disable_circuit_breaker: bool = False
    pd_disaggregation: bool = False
