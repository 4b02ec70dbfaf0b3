import argparse

import pytest

from omni_proxy.replica.kv_events.publisher_settings import (
    add_kv_event_options,
    bind_address,
    binds,
    kv_event_params,
    kv_events_problem,
    parse_kv_event_settings,
    sglang_source,
    stage_information,
    tcp_parts,
    vllm_sources,
)
from omni_proxy.replica.replica_command import serve_parser
from omni_proxy.replica.stages.text import parse_settings


@pytest.mark.parametrize(
    ("endpoint", "listens"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///tmp/events", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://router.example:5557", False),
    ],
)
def test_endpoints_are_bound_or_connected_as_by_vllm(endpoint, listens):
    assert binds(endpoint) is listens


@pytest.mark.parametrize(
    ("endpoint", "host", "address"),
    [
        ("tcp://*:5557", "127.0.0.1", "tcp://127.0.0.1:5557"),
        ("tcp://*:0", "::1", "tcp://[::1]:0"),
        ("tcp://[::]:5557", "127.0.0.1", "tcp://[::]:5557"),
        ("tcp://:::5557", "127.0.0.1", "tcp://[::]:5557"),
        ("ipc:///tmp/events", "127.0.0.1", "ipc:///tmp/events"),
    ],
)
def test_a_wildcard_binds_to_the_host_of_the_replica(endpoint, host, address):
    assert bind_address(endpoint, host) == address


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"endpoint": "tcp://*"}, "neither tcp://HOST:PORT"),
        ({"endpoint": "tcp://*:70000"}, "neither tcp://HOST:PORT"),
        ({"endpoint": "inproc://events"}, "neither tcp://HOST:PORT"),
        ({"endpoint": "tcp://localhost:0"}, "no port 0 to connect to"),
        ({"endpoint": "tcp://*:1", "replay_endpoint": "here"}, "replay_endpoint 'here'"),
        ({"replay_endpoint": "tcp://*:1"}, "replay_endpoint needs an endpoint"),
        ({"endpoint": "tcp://*:1", "buffer_steps": 0}, "buffer_steps must be within"),
        ({"endpoint": "tcp://*:1", "form": "dynamo"}, "form"),
        ({"endpoint": "tcp://*:1", "colour": "red"}, "unknown field `colour`"),
    ],
)
def test_the_error_names_the_invalid_parameter(params, reason):
    with pytest.raises(ValueError, match="kv_events") as caught:
        parse_kv_event_settings(params)
    assert reason in str(caught.value)


def test_a_block_that_the_cache_would_not_reuse_is_refused():
    events = {"endpoint": "tcp://*:0", "block_size": 8}
    with pytest.raises(ValueError, match="a block of 8 tokens is too short"):
        parse_settings("decode", {"kv_events": events})
    assert parse_settings("decode", {"kv_events": events, "prefix_min_tokens": 8}).events.enabled


def arguments(*options):
    return serve_parser().parse_args(options)


def params(*options):
    parsed = arguments(*options)
    assert kv_events_problem(parsed) == ""
    return kv_event_params(parsed).get("kv_events")


def test_nothing_is_published_unless_enabled():
    assert params() is None
    assert params("--kv-events-config", "{}") is None
    assert params("--kv-events-config", '{"enable_kv_cache_events": false}') is None
    assert params("--kv-events-config", '{"publisher": "null"}') is None


def test_plain_options_and_the_json_of_both_engines_are_equivalent():
    plain = params("--kv-events", "tcp://*:5557", "--kv-replay", "tcp://*:5558")
    rest = '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
    vllm = params(
        "--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "zmq", ' + rest
    )
    sglang = params("--kv-events-config", '{"publisher": "zmq", ' + rest)
    assert parse_kv_event_settings(plain) == parse_kv_event_settings(vllm)
    assert vllm == sglang


def test_the_json_needs_no_endpoint_and_no_publisher():
    stage_params = params("--kv-events-config", '{"enable_kv_cache_events": true, "topic": "kv"}')
    settings = parse_kv_event_settings(stage_params)
    assert (settings.endpoint, settings.replay_endpoint) == ("tcp://*:5557", "")
    assert (settings.topic, settings.buffer_steps) == ("kv", 10_000)


def test_the_form_is_that_of_the_dialect_unless_given():
    enabled = ("--kv-events", "tcp://*:0")
    assert params(*enabled)["form"] == "vllm"
    assert params(*enabled, "--dialect", "sglang")["form"] == "sglang"
    assert params(*enabled, "--dialect", "sglang", "--kv-events-form", "vllm")["form"] == "vllm"
    assert params(*enabled, "--page-size", "64")["block_size"] == 64


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--kv-replay", "tcp://*:0"), "--kv-events"),
        (("--kv-events", "tcp://*:0", "--kv-events-config", "{}"), "remove them"),
        (("--kv-events-config", "{"), "--kv-events-config"),
        (("--kv-events-config", '{"publisher": "nats"}'), "--kv-events-config"),
        (("--kv-events", "5557"), "neither tcp://HOST:PORT"),
        (("--kv-events", "tcp://*:0", "--block-size", "0"), "block_size"),
        (("--kv-events", "tcp://*:0", "--engine", "llamacpp"), "--engine torch"),
    ],
)
def test_the_problem_names_the_option(options, reason):
    assert reason in kv_events_problem(arguments(*options))


def test_the_options_are_in_one_group_of_the_help():
    parser = argparse.ArgumentParser()
    add_kv_event_options(parser)
    assert "KV events:" in parser.format_help()


def test_opened_endpoints_are_reported_in_the_format_of_each_engine():
    settings = parse_kv_event_settings({"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"})
    stages = [{}, stage_information(settings, "tcp://*:40001", "tcp://*:40002")]
    assert vllm_sources(stages) == {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:40001",
            "replay_endpoint": "tcp://*:40002",
            "buffer_steps": 10000,
            "hwm": 100000,
            "max_queue_size": 100000,
            "topic": "",
        }
    }
    source = sglang_source(stages)
    assert (source["publisher"], source["endpoint_host"], source["endpoint_port_base"]) == (
        "zmq", "*", 40001,
    )  # fmt: skip
    assert (source["block_size"], source["dp_size"]) == (16, 1)


def test_a_publisher_that_connects_reports_no_port():
    settings = parse_kv_event_settings({"endpoint": "tcp://10.0.0.1:5557"})
    stages = [stage_information(settings, settings.endpoint, "")]
    assert sglang_source(stages) is None
    assert vllm_sources(stages)["0"]["replay_endpoint"] is None
    assert sglang_source([]) is None
    assert vllm_sources([]) == {}


def test_the_host_and_port_of_an_endpoint():
    assert tcp_parts("tcp://*:5557") == ("*", 5557)
    assert tcp_parts("tcp://[::1]:5557") == ("[::1]", 5557)
    assert tcp_parts("ipc:///tmp/x") == ("", -1)
