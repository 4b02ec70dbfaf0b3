import pytest

from omni_proxy.replica.kv_transfer.transfer_settings import (
    LOOPBACK,
    TransferSettings,
    is_allowed,
    parse_peers,
    parse_transfer_settings,
    transfer_params,
    transfer_problem,
)
from omni_proxy.replica.replica_command import serve_parser


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_only_this_machine_is_a_peer_by_default(address, allowed):
    assert is_allowed(address, parse_peers(LOOPBACK)) is allowed


def test_networks_and_any_can_be_allowed_as_peers():
    assert is_allowed("10.1.2.3", parse_peers(("10.0.0.0/8",)))
    assert not is_allowed("11.1.2.3", parse_peers(("10.0.0.0/8",)))
    assert is_allowed("11.1.2.3", parse_peers(("any",)))


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"rolle": "prefill"}, "no key 'rolle'"),
        ({"role": "both"}, "role is prefill, decode or null"),
        ({"connector": "nccl"}, "connector is one of"),
        ({"port": -1}, "bootstrap port"),
        ({"lease_secs": 0}, "lease_secs"),
        ({"wait_secs": 1e9}, "wait_secs"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"peers": ["some.host"]}, "peers are addresses"),
    ],
)
def test_invalid_parameters_are_refused_by_name(params, reason):
    with pytest.raises(ValueError, match=reason):
        parse_transfer_settings(params)


def parse_options(*options):
    return serve_parser().parse_args(["--model", "tiny", *options])


def test_without_a_role_the_stage_gets_no_parameter():
    assert transfer_params(parse_options("--bootstrap-port", "9")) == {}


def test_flags_become_the_stages_settings():
    arguments = parse_options(
        "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0",
        "--kv-connector", "nixl", "--kv-host", "[::1]", "--kv-peers", "10.0.0.0/8,::1",
        "--kv-lease-secs", "1", "--kv-wait-secs", "2", "--kv-transfer-secs", "3",
        "--kv-max-bytes", "4",
    )  # fmt: skip
    assert transfer_problem(arguments) == ""
    assert parse_transfer_settings(transfer_params(arguments)["kv_transfer"]) == TransferSettings(
        role="prefill", connector="nixl", port=0, advertise="::1", peers=("10.0.0.0/8", "::1"),
        lease_secs=1, wait_secs=2, transfer_secs=3, max_bytes=4,
    )  # fmt: skip


def test_the_connector_follows_the_dialect():
    plain = parse_options("--role", "decode")
    vllm = parse_options("--role", "decode", "--dialect", "vllm")
    assert transfer_params(plain)["kv_transfer"]["connector"] == "sglang"
    assert transfer_params(vllm)["kv_transfer"]["connector"] == "nixl"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--engine", "llamacpp"], "needs --engine torch"),
        (["--tp", "2"], "remove --tp"),
        (["--kv-connector", "sglang", "--dialect", "vllm"], "none of SGLang's routes"),
        (["--kv-connector", "nixl", "--host", "0.0.0.0"], "--kv-host"),
        (["--kv-peers", "nowhere"], "peers are addresses"),
    ],
)
def test_a_role_that_cannot_work_is_refused_before_the_start(options, problem):
    assert problem in transfer_problem(parse_options("--role", "prefill", *options))
