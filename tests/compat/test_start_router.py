import pytest

from omni_proxy.compat import RouterArgsError, SglangRouterArgs, VllmRouterArgs
from omni_proxy.compat.start_router import command_words, order_for, startup_of
from omni_proxy.config.schema import Config

BOTH = pytest.mark.parametrize("kind", [SglangRouterArgs, VllmRouterArgs])


def start(args):
    startup = startup_of(order_for(args))
    return startup.effective_config(Config()), startup


@BOTH
def test_the_defaults_are_applied_without_warnings(kind):
    args = kind()
    config, startup = start(args)
    assert startup.warnings == ()
    assert startup.dialect == kind.dialect
    assert (config.server.host, config.server.port) == (args.host, args.port)
    assert config.routing.policy == "cache_aware"
    cache = config.routing.cache_aware
    assert (cache.cache_threshold, cache.balance_abs_threshold) == (0.3, 64)
    assert cache.eviction_interval_secs == args.eviction_interval_secs
    assert cache.max_tree_size == args.max_tree_size
    assert (config.routing.max_worker_retries, config.routing.max_total_retries) == (10, 5)
    assert config.health.interval_secs == 60
    assert config.health.startup_timeout_secs == args.worker_startup_timeout_secs
    assert config.health.probe_healthy is True
    assert config.server.max_inflight == max(args.max_concurrent_requests, 0)
    assert config.server.cors_allow_origins == ("*",)  # an empty list means any origin there
    assert (config.admin.metrics_listen, config.server.log_file) == ("", "off")


def test_requests_can_wait_in_the_queue_even_without_a_limit():
    config, _ = start(SglangRouterArgs())
    assert (config.server.max_inflight, config.server.queue_size) == (0, 100)
    config, _ = start(SglangRouterArgs(queue_size=7, max_concurrent_requests=3))
    assert (config.server.max_inflight, config.server.queue_size) == (3, 7)
    assert config.server.queue_timeout_secs == 60


def test_the_settings_of_slime_are_applied():
    args = SglangRouterArgs(host="[::1]", port=3000, prometheus_port=4000, log_level="warn")
    args.request_timeout_secs = 600
    args.disable_circuit_breaker = args.disable_health_check = True
    config, startup = start(args)
    assert (config.server.host, config.server.port) == ("::1", 3000)
    assert config.server.request_timeout_secs == 600
    assert config.server.log_level == "warning"
    assert (config.routing.max_worker_retries, config.health.probe_healthy) == (0, False)
    assert config.admin.metrics_listen == "127.0.0.1:4000"
    assert startup.warnings == ()


def test_keys_folders_headers_and_addresses_are_passed_on(tmp_path):
    args = VllmRouterArgs(
        api_key="k3y", log_dir=str(tmp_path), request_id_headers=["x-a", "x-b"],
        prometheus_port=29000, prometheus_host="::", disable_retries=True,
        worker_urls=["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
    )  # fmt: skip
    config, startup = start(args)
    assert (config.server.api_key, config.admin.api_key) == ("k3y", "")
    assert config.server.log_file == str(tmp_path / "omni-proxy.log")
    assert config.server.request_id_headers == ("x-a", "x-b")
    assert config.admin.metrics_listen == "[::]:29000"
    assert config.routing.max_total_retries == 1
    assert startup.flag_urls == ("http://10.0.0.1:8000", "http://10.0.0.2:8000")


def test_session_ids_are_read_from_the_names_of_each_router():
    vllm = start(VllmRouterArgs(policy="sticky_least_loaded"))[0].routing
    assert vllm.session_headers[0] == "x-session-id"
    assert (
        "authorization" not in vllm.session_headers
    )  # OpenAI clients send the same value in all sessions
    assert vllm.session_body_keys[0] == "session_params.session_id"
    assert vllm.sticky_load == "sessions"
    sglang = start(SglangRouterArgs(policy="manual"))[0].routing
    assert sglang.session_headers[0] == "x-smg-routing-key"
    assert sglang.sticky_load == "requests"


@pytest.mark.parametrize(
    ("name", "policy", "sticky"),
    [
        ("consistent_hash", "consistent_hashing", False),
        ("manual", "least_request", True),
        ("sticky_least_loaded", "least_request", True),
        ("session_aware", "least_request", True),
        ("power_of_two", "power_of_two", False),
    ],
)
def test_policies_have_the_names_of_the_router(name, policy, sticky):
    routing = start(VllmRouterArgs(policy=name))[0].routing
    assert (routing.policy, routing.sticky_sessions) == (policy, sticky)


def test_each_argument_without_effect_has_one_warning_and_unknown_ones_share_one():
    args = SglangRouterArgs(enable_igw=True, retry_jitter_factor=0.5, novelty=1, wonder=2)
    _, startup = start(args)
    assert [line.split()[0] for line in startup.warnings[1:]] == [
        "--enable-igw", "--retry-jitter-factor"
    ] or [line.split()[0] for line in startup.warnings[1:]] == [
        "--retry-jitter-factor", "--enable-igw"
    ]  # fmt: skip
    assert startup.warnings[0].endswith("no effect: novelty, wonder")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (SglangRouterArgs(mini_lb=True), "mini_lb: a policy picks"),
        (
            SglangRouterArgs(bootstrap_port_annotation="x/y"),
            "bootstrap_port_annotation: the annotations",
        ),
        (
            SglangRouterArgs(
                service_discovery=True, prefill_selector={"a": "b"}, selector={"c": "d"}
            ),
            "--prefill-selector: needs a flag for the KV",
        ),
        (VllmRouterArgs(kv_connector="moriio"), "moriio"),
        (SglangRouterArgs(prefill_urls=[("http://p:1", 1)]), "--pd-disaggregation for SGLang"),
        (SglangRouterArgs(service_discovery=True), "--service-discovery: needs a selector"),
        (SglangRouterArgs(backend="openai"), "backend: workers may run any engine"),
        (SglangRouterArgs(oracle_password="s3cret"), "oracle_password: responses"),
        (VllmRouterArgs(policy="kv_aware"), "kv_aware"),
        (VllmRouterArgs(port="http"), "--port: expected a whole number"),
        (VllmRouterArgs(worker_urls=["nowhere"]), "--worker-urls"),
    ],
)
def test_unsupported_arguments_are_refused_before_the_start(args, message):
    with pytest.raises(RouterArgsError, match=message) as refused:
        order_for(args)
    assert "s3cret" not in str(refused.value)


def test_all_refusals_are_reported_together():
    with pytest.raises(RouterArgsError) as refused:
        command_words(SglangRouterArgs(mini_lb=True, enable_trace=True))
    assert len(str(refused.value).splitlines()) == 3


def roles(startup):
    return [
        (worker.url, worker.role, worker.kv_connector, worker.bootstrap_port)
        for worker in startup.pool_workers
        if worker.role == "prefill"
    ] + [(worker.url, worker.role) for worker in startup.pool_workers if worker.role == "decode"]


def test_prefill_and_decode_workers_of_slime_are_supported():
    args = SglangRouterArgs(
        pd_disaggregation=True,
        prefill_urls=[("http://p:1", 9000), ("http://q:1", None)],
        decode_urls=["http://d:1"],
        prefill_policy="cache_aware",
        decode_policy="least_load",
    )
    _, startup = start(args)
    assert roles(startup) == [
        ("http://p:1", "prefill", "sglang", 9000),
        ("http://q:1", "prefill", "sglang", 0),
        ("http://d:1", "decode"),
    ]
    rules = startup.effective_config(Config()).routing.disaggregation
    assert (rules.prefill_policy, rules.decode_policy) == ("cache_aware", "least_request")


def test_a_router_of_slime_without_workers_is_supported():
    _, startup = start(SglangRouterArgs(pd_disaggregation=True))
    assert (startup.pool_workers, startup.kv_connector) == ((), "sglang")


def test_prefill_and_decode_workers_of_skyrl_are_supported():
    args = VllmRouterArgs(
        vllm_pd_disaggregation=True,
        prefill_urls=[("http://p:1", None)],
        decode_urls=["http://d:1"],
        prefill_policy="consistent_hash",
        decode_policy="consistent_hash",
    )
    _, startup = start(args)
    assert roles(startup) == [("http://p:1", "prefill", "nixl", 0), ("http://d:1", "decode")]
    assert startup.kv_connector == "nixl"
    rules = startup.effective_config(Config()).routing.disaggregation
    assert rules.decode_policy == "consistent_hashing"


def test_workers_that_register_at_a_vllm_router_get_its_connector():
    _, startup = start(VllmRouterArgs(vllm_pd_disaggregation=True, kv_connector="mooncake"))
    assert startup.kv_connector == "mooncake"
