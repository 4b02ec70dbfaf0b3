import argparse
import copy
import dataclasses
import pickle
from types import SimpleNamespace

import pytest

from omni_proxy.cli.flags.other_router_flags import WITHOUT_EFFECT
from omni_proxy.compat import RouterArgs, SglangRouterArgs, VllmRouterArgs
from omni_proxy.compat.base_router_args import (
    WITHOUT_FLAG,
    field_table,
    flag_of,
    has_effect,
    refusal_of,
)

BOTH = pytest.mark.parametrize("kind", [SglangRouterArgs, VllmRouterArgs])


def parser_of(kind, **options):
    parser = argparse.ArgumentParser()
    kind.add_cli_args(parser, **options)
    return parser


def actions(kind):
    return [each for each in parser_of(kind)._actions if each.dest != "help"]


def test_router_args_are_those_of_sglang():
    assert RouterArgs is SglangRouterArgs


def test_each_class_has_the_defaults_of_its_router():
    sglang, vllm = SglangRouterArgs(), VllmRouterArgs()
    assert (sglang.host, vllm.host) == ("0.0.0.0", "127.0.0.1")
    assert (sglang.worker_startup_timeout_secs, vllm.worker_startup_timeout_secs) == (1800, 600)
    assert (sglang.max_concurrent_requests, vllm.max_concurrent_requests) == (-1, 32768)
    assert (sglang.prometheus_port, vllm.prometheus_port) == (None, None)
    # SkyRL reads both attributes.
    assert (vllm.vllm_pd_disaggregation, vllm.pd_disaggregation) == (False, False)
    assert not hasattr(vllm, "disable_health_check")  # slime checks whether it exists


@BOTH
def test_lists_are_not_shared_between_arguments(kind):
    kind().worker_urls.append("http://a:1")
    assert kind().worker_urls == []


@BOTH
def test_values_can_be_positional(kind):
    args = kind(["http://a:1"], "::1", 5)
    assert (args.worker_urls, args.host, args.port) == (["http://a:1"], "::1", 5)
    with pytest.raises(TypeError, match="passed by position and by keyword: host"):
        kind([], "::1", host="::2")
    with pytest.raises(TypeError, match="values, but there are"):
        kind(*range(500))


@BOTH
def test_unknown_fields_are_kept(kind):
    args = kind(upstream_http2=True)
    args.router_policy = "random"
    assert args.unknown_fields() == {"upstream_http2": True, "router_policy": "random"}
    for copied in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert copied == args
        assert copied.unknown_fields() == args.unknown_fields()


@BOTH
def test_arguments_work_as_dataclasses(kind):
    args = dataclasses.replace(kind(port=1), host="a")
    assert (args.host, args.port) == ("a", 1)
    assert args == kind(host="a", port=1) != kind()
    assert "port=1" in repr(args)
    assert "s3cret" not in repr(kind(api_key="s3cret"))


@BOTH
def test_every_field_is_supported_or_refused_or_documented_without_effect(kind):
    for name in field_table(kind):
        flag = flag_of(name)
        cases = [has_effect(flag), bool(refusal_of(flag)), flag in WITHOUT_EFFECT]
        assert cases.count(True) == 1, name


@BOTH
def test_the_defaults_of_flags_are_the_defaults_of_arguments(kind):
    args = kind.from_cli_args(parser_of(kind).parse_args([]))
    assert args.prometheus_port == 29000  # the default of the commands, not of the classes
    assert (args.prometheus_host, args.log_level) == (
        {"sglang": "0.0.0.0", "vllm": "127.0.0.1"}[kind.dialect],
        "info",
    )
    same = {"prometheus_port": None, "prometheus_host": None, "log_level": None}
    assert dataclasses.replace(args, **same) == kind()


def value_for(action):
    if action.nargs == 0:
        return []
    if action.dest == "prefill":
        return ["http://p:1", "9000"]
    if action.dest == "control_plane_api_keys":
        return ["id:Name:admin:key"]
    if "selector" in action.dest or action.dest == "jwt_role_mapping":
        return ["a=b"]
    return ["7"]


@BOTH
def test_every_flag_reaches_its_field(kind):
    names = {flag_of(name): name for name in field_table(kind)}
    for action in actions(kind):
        (flag,) = action.option_strings
        args = kind.from_cli_args(parser_of(kind).parse_args([flag, *value_for(action)]))
        changed = dataclasses.replace(args, prometheus_host=None, log_level=None)
        if flag != "--prometheus-port":
            changed.prometheus_port = None
        if flag in ("--prometheus-host", "--log-level"):
            continue
        differ = [
            name for name in names.values() if getattr(changed, name) != getattr(kind(), name)
        ]
        assert differ == [names[flag]], flag
    assert {flag_of(name) for name in WITHOUT_FLAG}.isdisjoint(
        flag for action in actions(kind) for flag in action.option_strings
    )


@BOTH
def test_with_the_prefix_all_flags_but_address_and_workers_have_it(kind):
    parser = parser_of(kind, use_router_prefix=True, exclude_host_port=True)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert not {"--host", "--port", "--policy"} & flags
    assert {"--worker-urls", "--router-policy", "--router-prefill"} <= flags
    # A trainer's own arguments are in the same namespace.
    parser.add_argument("--sglang-router-ip")
    parser.add_argument("--moe-router-dtype", default="fp32")
    parser.add_argument("--host", default="trainer")
    parsed = parser.parse_args(["--router-policy", "random", "--router-max-tree-size", "9"])
    args = kind.from_cli_args(parsed, use_router_prefix=True)
    assert (args.policy, args.max_tree_size, args.unknown_fields()) == ("random", 9, {})


@BOTH
def test_host_and_port_have_no_prefix_unless_excluded(kind):
    parser = parser_of(kind, use_router_prefix=True)
    args = kind.from_cli_args(parser.parse_args(["--host", "h", "--port", "3"]), True)
    assert (args.host, args.port) == ("h", 3)


def test_the_flags_of_one_router_make_the_arguments_of_the_other():
    """vime registers the flags of the first package that it finds."""
    parser = parser_of(SglangRouterArgs, use_router_prefix=True, exclude_host_port=True)
    arguments = "--router-policy random --router-disable-health-check --router-max-idle-secs 9"
    args = VllmRouterArgs.from_cli_args(
        parser.parse_args(arguments.split()), use_router_prefix=True
    )
    assert (args.policy, args.max_concurrent_requests) == ("random", -1)
    assert args.unknown_fields() == {"disable_health_check": True, "max_idle_secs": 9}
    assert isinstance(dataclasses.replace(args, max_concurrent_requests=5), VllmRouterArgs)


def test_urls_selectors_and_keys_are_read_as_the_routers_read_them():
    arguments = (
        "--prefill http://p:1 9000 --prefill http://q:1 none --prefill http://r:1 "
        "--decode http://d:1 --decode http://e:1 --selector app=x role=y "
        "--control-plane-api-keys id:Name:admin:se:cret --jwt-role-mapping G.A=admin "
        "--tls-cert-path c.pem --tls-key-path k.pem"
    )
    args = SglangRouterArgs.from_cli_args(parser_of(SglangRouterArgs).parse_args(arguments.split()))
    assert args.prefill_urls == [("http://p:1", 9000), ("http://q:1", None), ("http://r:1", None)]
    assert args.decode_urls == ["http://d:1", "http://e:1"]
    assert args.selector == {"app": "x", "role": "y"}
    assert args.control_plane_api_keys == [("id", "Name", "se:cret", "admin")]
    assert args.jwt_role_mapping == {"G.A": "admin"}
    assert (args.server_cert_path, args.server_key_path) == ("c.pem", "k.pem")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prefill http://p:1 x", '--prefill http://p:1: "x" is not a port'),
        ("--selector app", '--selector: "app" has no "="'),
        ("--control-plane-api-keys a:b:king:c", "--control-plane-api-keys: write id:name:role:key"),
    ],
)
def test_the_error_for_an_invalid_value_names_it(arguments, message):
    parsed = parser_of(SglangRouterArgs).parse_args(arguments.split())
    with pytest.raises(ValueError, match=message):
        SglangRouterArgs.from_cli_args(parsed)


def test_parsed_values_are_used_unchanged():
    parsed = SimpleNamespace(
        prefill_urls=[("http://p:1", None)], decode_urls=["http://d:1"], selector={"a": "b"}
    )
    args = VllmRouterArgs.from_cli_args(parsed)
    assert (args.prefill_urls, args.decode_urls) == ([("http://p:1", None)], ["http://d:1"])
    assert args.selector == {"a": "b"}
