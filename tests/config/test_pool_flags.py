import pytest

from omni_proxy.config.overlay import SavedState, desired_workers
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.pool_flags import PoolFlags, connector_of, pool_workers
from omni_proxy.config.schema import Config

P, Q, D = (["http://p:1"], ["http://q:1"], "http://d:1")


def refusal(flags, urls=()):
    with pytest.raises(ConfigError) as caught:
        pool_workers(flags, urls)
    return str(caught.value)


def test_workers_come_in_order_with_role_connector_and_port():
    flags = PoolFlags(prefill=([*P, "9000"], [*Q, "none"]), decode=(D,), sglang=True)
    specs = desired_workers(Config(), pool_workers(flags, ()), SavedState())
    assert [(each.url, each.role, each.bootstrap_port) for each in specs] == [
        ("http://p:1", "prefill", 9000),
        ("http://q:1", "prefill", None),
        ("http://d:1", "decode", 8998),
    ]
    assert {each.kv_connector for each in specs} == {"sglang"}
    assert {each.origin for each in specs} == {"flag"}


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
def test_the_connector_follows_from_the_flags(flags, connector):
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
def test_what_cannot_be_served_is_refused_with_the_flag_and_a_way_out(flags, reason):
    assert reason in refusal(flags)


def test_a_worker_of_a_pool_is_no_regular_worker_too():
    flags = PoolFlags(prefill=(P,), sglang=True)
    assert "is named twice" in refusal(flags, urls=("http://p:1",))


def test_all_problems_are_reported_together():
    flags = PoolFlags(prefill=(["x"], [*P, "y"]), decode=("z",), sglang=True)
    assert len(refusal(flags).splitlines()) == 3
