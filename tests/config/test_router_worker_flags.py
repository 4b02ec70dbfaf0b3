import pytest

from omni_proxy.cli.serve import router_startup
from omni_proxy.config.overlay import SavedState, desired_workers
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.router_worker_flags import PoolFlags, connector_of, pool_workers
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.discover import matches, parse_selector

P, Q, D = (["http://p:1"], ["http://q:1"], "http://d:1")


def refusal(flags, urls=()):
    with pytest.raises(ConfigError) as caught:
        pool_workers(flags, urls)
    return str(caught.value)


def test_workers_of_pools_have_role_connector_and_port_in_order():
    flags = PoolFlags(prefill=([*P, "9000"], [*Q, "none"]), decode=(D,), sglang=True)
    specs = desired_workers(Config(), pool_workers(flags, ()), SavedState())
    assert [(spec.url, spec.role, spec.bootstrap_port) for spec in specs] == [
        ("http://p:1", "prefill", 9000),
        ("http://q:1", "prefill", None),
        ("http://d:1", "decode", 8998),
    ]
    assert {spec.kv_connector for spec in specs} == {"sglang"}
    assert {spec.origin for spec in specs} == {"flag"}


@pytest.mark.parametrize(
    ("flags", "connector"),
    [
        (PoolFlags(), "sglang"),
        (PoolFlags(sglang=True), "sglang"),
        (PoolFlags(vllm=True), "nixl"),
        (PoolFlags(vllm=True, connector="mooncake"), "mooncake"),
        (PoolFlags(prefill=(P,), connector="nixl"), "nixl"),
    ],
)
def test_the_connector_depends_on_the_flags(flags, connector):
    assert connector_of(flags) == connector


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (PoolFlags(prefill=(P,)), "--prefill: needs a flag for the KV transfer protocol"),
        (PoolFlags(decode=(D,)), "--decode: needs a flag"),
        (PoolFlags(sglang=True, vllm=True), "can't be combined with --vllm-pd-disaggregation"),
        (PoolFlags(sglang=True, connector="nixl"), "use --vllm-pd-disaggregation"),
        (PoolFlags(vllm=True, connector="sglang"), "needs nixl or mooncake"),
        (PoolFlags(vllm=True, connector="moriio"), '"moriio" is not supported'),
        (PoolFlags(vllm=True, connector="nixel"), "did you mean `nixl`?"),
        (PoolFlags(prefill=([*P, "x"],), sglang=True), '"x" is not a bootstrap port'),
        (PoolFlags(prefill=([*P, "0"],), sglang=True), '"0" is not a bootstrap port'),
        (PoolFlags(prefill=([*P, "65536"],), sglang=True), "is not a bootstrap port"),
        (PoolFlags(prefill=([*P, "1", "2"],), sglang=True), '"1 2" is not a bootstrap port'),
        (PoolFlags(prefill=(P, P), sglang=True), '--prefill: "http://p:1": is named twice'),
        (PoolFlags(prefill=(P,), decode=P, sglang=True), '--decode: "http://p:1": is named'),
        (PoolFlags(decode=("nowhere",), sglang=True), '--decode: "nowhere"'),
    ],
)
def test_invalid_pool_flags_are_refused_with_a_remedy(flags, reason):
    assert reason in refusal(flags)


def test_a_worker_of_a_pool_cannot_be_a_regular_worker_too():
    flags = PoolFlags(prefill=(P,), sglang=True)
    assert "is named twice" in refusal(flags, urls=("http://p:1",))


def test_all_problems_are_reported_together():
    flags = PoolFlags(prefill=(["x"], [*P, "y"]), decode=("z",), sglang=True)
    assert len(refusal(flags).splitlines()) == 3


def discovery_tables(args: str):
    return router_startup(args.split()).effective_config(Config()).discover


def discovery_refusal(args: str) -> str:
    with pytest.raises(ConfigError) as error:
        discovery_tables(args)
    return str(error.value)


def test_service_discovery_has_the_defaults_of_sglang_router():
    (entry,) = discovery_tables("--service-discovery --selector app=sglang tier=gpu")
    assert (entry.kind, entry.namespace, entry.port, entry.role) == ("kubernetes", "*", 80, "")
    assert matches(parse_selector(entry.selector), {"app": "sglang", "tier": "gpu"})
    assert not matches(parse_selector(entry.selector), {"app": "sglang"})


def test_port_namespace_and_model_are_set_by_flags():
    (entry,) = discovery_tables(
        "--service-discovery --selector app=x --service-discovery-port 8000 "
        "--service-discovery-namespace models --model-id-from label:omni.dev/model"
    )
    assert (entry.port, entry.namespace, entry.model_label) == (8000, "models", "omni.dev/model")


@pytest.mark.parametrize(
    ("flag", "connector"),
    [
        ("--pd-disaggregation", "sglang"),
        ("--vllm-pd-disaggregation", "nixl"),
        ("--vllm-pd-disaggregation --kv-connector mooncake", "mooncake"),
    ],
)
def test_prefill_and_decode_pods_have_a_table_each(flag, connector):
    entries = discovery_tables(
        f"--service-discovery {flag} --prefill-selector role=p --decode-selector role=d --selector x=y"
    )
    assert [(entry.role, entry.selector, entry.kv_connector) for entry in entries] == [
        ("prefill", "role=p", connector), ("decode", "role=d", connector),
    ]  # fmt: skip
    assert len({entry.name for entry in entries}) == 2


def test_without_service_discovery_its_flags_have_no_effect():
    assert (
        discovery_tables("--selector app=x --service-discovery-port 80 --prefill-selector a=b")
        == ()
    )


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("", "--service-discovery: needs a selector; add --selector"),
        ("--selector app", '--selector: "app" has no "="'),
        ("--selector a=b!", "is not a term of a label selector"),
        ("--selector a=b --decode-selector a=b", "needs a flag for the KV transfer protocol"),
        ("--pd-disaggregation --selector a=b", "add --prefill-selector, --decode-selector"),
        ("--selector a=b --service-discovery-port 0", '"0" is not a port'),
        (
            "--selector a=b --model-id-from namespace",
            '"namespace" is not supported; write label:KEY',
        ),
    ],
)
def test_incomplete_discovery_flags_are_refused(args, reason):
    assert reason in discovery_refusal(f"--service-discovery {args}")


def test_arguments_of_other_routers_become_these_flags():
    from omni_proxy.compat.sglang_router_args import SglangRouterArgs
    from omni_proxy.compat.start_router import order_for
    from omni_proxy.compat.vllm_router_args import VllmRouterArgs

    for cls in (SglangRouterArgs, VllmRouterArgs):
        args = cls(
            service_discovery=True, selector={"app": "x", "tier": "y"},
            service_discovery_port=9000, service_discovery_namespace="n",
        )  # fmt: skip
        (entry,) = discovery_tables(" ".join(order_for(args).words))
        assert (entry.selector, entry.port, entry.namespace) == ("app=x,tier=y", 9000, "n")
        assert discovery_tables(" ".join(order_for(cls(selector={"app": "x"})).words)) == ()
