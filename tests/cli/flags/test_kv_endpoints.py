import json

import pytest

from omni_proxy.cli.flags.kv_endpoints import PortsOverlapError, ports_apart, publishes


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--kv-events tcp://*:5557", "--kv-events tcp://*:{5557+index}"),
        ("--kv-events=tcp://*:5557 --x", "--kv-events=tcp://*:{5557+index} --x"),
        ("--kv-events tcp://[::]:5557", "--kv-events tcp://[::]:{5557+index}"),
        ("--kv-events tcp://*:0 --kv-replay tcp://*:0",) * 2,
        ("--kv-events tcp://10.0.0.1:5557",) * 2,
        (
            "--kv-events tcp://*:0 --kv-replay tcp://10.0.0.1:6000",
            "--kv-events tcp://*:0 --kv-replay tcp://10.0.0.1:{6000+index}",
        ),
        ("--kv-events ipc:///tmp/e",) * 2,
        ("--port 5557 --dtype tcp://*:5557",) * 2,
        ("--kv-events",) * 2,
    ],
)
def test_each_replica_gets_ports_of_its_own(flags, changed):
    assert ports_apart(flags.split(), 0, 4) == tuple(changed.split())


@pytest.mark.parametrize(
    ("config", "endpoints"),
    [
        ({"publisher": "zmq"}, ("tcp://*:{5559+index}", None)),
        (
            {"endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:7000", "topic": "kv"},
            ("tcp://*:{6002+index}", "tcp://*:{7002+index}"),
        ),
    ],
)
def test_the_json_of_engines_is_changed_too_behind_other_replicas(config, endpoints):
    _, text = ports_apart(["--kv-events-config", json.dumps(config)], 2, 2)
    changed = json.loads(text)
    assert (changed["endpoint"], changed.get("replay_endpoint")) == endpoints
    assert {key: changed[key] for key in config if "endpoint" not in key} == {
        key: value for key, value in config.items() if "endpoint" not in key
    }


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_what_is_no_json_object_is_left_to_the_engine(text):
    assert ports_apart(["--kv-events-config", text], 0, 2) == ("--kv-events-config", text)


def test_ports_that_would_meet_are_refused():
    flags = ["--kv-events", "tcp://*:5557", "--kv-replay", "tcp://*:5558"]
    assert ports_apart(flags, 0, 1)[1] == "tcp://*:{5557+index}"
    with pytest.raises(PortsOverlapError, match="ports 5557 and 5558 are too close for 2 replicas"):
        ports_apart(flags, 0, 2)
    with pytest.raises(PortsOverlapError, match="port 0"):
        ports_apart(flags, 1, 1)


def test_who_publishes():
    assert publishes(["--x", "--kv-events=tcp://*:0"])
    assert publishes(["--kv-events-config", "{}"])
    assert not publishes(["--kv-replay", "tcp://*:0"])
