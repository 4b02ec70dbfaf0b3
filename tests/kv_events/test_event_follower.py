from dataclasses import replace

import pytest

from omni_proxy.fleet.worker import Worker
from omni_proxy.kv_events.event_follower import (
    EventSource,
    configured_source,
    host_of,
    sglang_sources,
    vllm_sources,
)
from tests.fleet.entries import NOW, entry

HOST = "10.0.0.7"


def vllm(endpoint, replay=None, **fields):
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint,
            "replay_endpoint": replay, "topic": ""} | fields  # fmt: skip


@pytest.mark.parametrize(
    ("endpoint", "source"),
    [
        ("tcp://*:5557", EventSource("tcp://10.0.0.7:5557", binds=False)),
        ("tcp://[::]:5557", EventSource("tcp://10.0.0.7:5557", binds=False)),
        ("ipc:///tmp/events", EventSource("ipc:///tmp/events", binds=False)),
        ("tcp://10.0.0.1:5557", EventSource("tcp://10.0.0.1:5557", binds=True)),
    ],
)
def test_the_proxy_binds_if_the_engine_connects(endpoint, source):
    assert vllm_sources({"0": vllm(endpoint)}, HOST) == (source,)


def test_vllm_reports_the_ports_of_each_rank():
    body = {"0": vllm("tcp://*:5557", "tcp://*:5600"), "1": vllm("tcp://*:5558", "tcp://*:5601")}
    assert vllm_sources(body, HOST) == (
        EventSource(f"tcp://{HOST}:5557", False, f"tcp://{HOST}:5600"),
        EventSource(f"tcp://{HOST}:5558", False, f"tcp://{HOST}:5601"),
    )


@pytest.mark.parametrize(
    "body",
    [None, [], {}, {"0": 7}, {"0": vllm("udp://*:1")}, {"0": vllm(7)},
     {"0": vllm("tcp://*:5557", publisher="null")},
     {"0": vllm("tcp://*:5557", enable_kv_cache_events=False)},
     {"0": vllm("tcp://*:5557"), "2": vllm("tcp://*:5559")}],
)  # fmt: skip
def test_a_body_without_publishers_of_all_ranks_has_no_sources(body):
    assert vllm_sources(body, HOST) == ()


def test_sglang_reports_the_port_of_its_first_rank():
    info = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2}
    assert sglang_sources({"kv_events": info}, HOST) == (
        EventSource(f"tcp://{HOST}:5557", binds=False),
        EventSource(f"tcp://{HOST}:5558", binds=False),
    )


def test_sglang_can_list_its_publishers():
    info = {"publisher": "zmq", "publishers": [{"dp_rank": 0, "endpoint": "tcp://*:7000"}]}
    assert sglang_sources({"kv_events": info}, HOST) == (EventSource(f"tcp://{HOST}:7000", False),)


@pytest.mark.parametrize(
    "events", [None, 7, {}, {"publisher": "null"}, {"publisher": "zmq"},
               {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": "5557"}],
)  # fmt: skip
def test_an_sglang_that_publishes_nothing_has_no_sources(events):
    assert sglang_sources({"kv_events": events}, HOST) == ()


def test_the_port_of_a_configured_endpoint_is_incremented_by_rank():
    assert configured_source("tcp://h:5557", "tcp://h:5600", 3) == EventSource(
        "tcp://h:5560", False, "tcp://h:5603"
    )
    assert configured_source("tcp://*:5557", "", 0) == EventSource("tcp://*:5557", binds=True)


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://10.1.2.3:8000", "10.1.2.3"), ("http://[fd00::1]:80", "[fd00::1]"),
     ("unix:/run/w.sock", "127.0.0.1")],
)  # fmt: skip
def test_the_host_of_a_worker_is_that_of_its_url(url, host):
    assert host_of(Worker(replace(entry("w0"), url=url), NOW)) == host
