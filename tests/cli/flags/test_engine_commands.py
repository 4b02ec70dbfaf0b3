import json

import pytest

from omni_proxy.cli.flags.engine_commands import (
    ENGINES,
    EngineCommandError,
    EngineRequest,
    PortsOverlapError,
    engine_capabilities,
    engine_command,
    engine_for,
    model_name,
    ports_apart,
    publishes,
)
from omni_proxy.config.fields import CAPABILITIES

ADDRESS_FLAGS = ("--host", "{host}", "--port", "{port}")


def request_for(model="org/model", size=1, name="", *flags):
    return EngineRequest(model, size, name, flags)


@pytest.mark.parametrize(
    ("engine", "engine_request", "command"),
    [
        ("replica", request_for("tiny"), "omni-proxy replica --model tiny"),
        ("replica", request_for("tiny", 2), "omni-proxy replica --model tiny --tp 2"),
        ("replica", request_for("/m/a", 1, "a"), "omni-proxy replica --model /m/a --model-name a"),
        ("llamacpp", request_for("tiny"), "omni-proxy replica --model tiny --engine llamacpp"),
        ("llamacpp", request_for("/m/a.gguf", 1, "a"), "llama-server --model /m/a.gguf --alias a"),
        ("sglang", request_for(), "python3 -m sglang.launch_server --model-path org/model"),
        ("sglang", request_for("m", 2), "python3 -m sglang.launch_server --model-path m --tp-size 2"),
        ("vllm", request_for("m", 4), "vllm serve m --tensor-parallel-size 4"),
        ("vllm", request_for(name="n"), "vllm serve org/model --served-model-name n"),
        ("omni", request_for(name="m"), "sgl-omni serve --model-path org/model --model-name m"),
    ],
)  # fmt: skip
def test_each_engine_has_its_own_command(engine, engine_request, command):
    assert engine_command(engine, engine_request) == (*command.split(), *ADDRESS_FLAGS)


def test_the_engines_own_flags_are_last_and_so_have_precedence():
    command = engine_command("vllm", request_for("m", 1, "", "--port", "1", "--dtype", "half"))
    assert command[-4:] == ("--port", "1", "--dtype", "half")


@pytest.mark.parametrize(
    ("engine", "engine_request", "remedy"),
    [
        ("sglang", request_for("tiny"), "leave --engine out"),
        ("vllm", request_for("smollm2-135m"), "leave --engine out"),
        ("llamacpp", request_for("smollm2-135m", 2), "--tp-size"),
        ("llamacpp", request_for("m.gguf", 2), "--tp-size"),
        ("omni", request_for("m", 2), "tp_size"),
    ],
)
def test_an_unsupported_request_is_refused_with_a_remedy(engine, engine_request, remedy):
    with pytest.raises(EngineCommandError, match=remedy):
        engine_command(engine, engine_request)


@pytest.mark.parametrize(
    ("engine", "engine_request", "name"),
    [
        ("replica", request_for("tiny"), "tiny"),
        ("llamacpp", request_for("tiny"), "tiny"),
        ("replica", request_for("/m/a.gguf"), "a.gguf"),
        ("sglang", request_for("org/model"), ""),
        ("sglang", request_for("org/model", 1, "m"), "m"),
    ],
)
def test_the_model_name_is_known_for_some_engines(engine, engine_request, name):
    assert model_name(engine, engine_request) == name


def test_the_engines():
    assert set(ENGINES) == {"replica", "sglang", "vllm", "llamacpp", "omni"}


@pytest.mark.parametrize(
    ("model", "engine"),
    [("tiny", "replica"), ("/m/a.gguf", "replica"), ("meta-llama/Llama-3.1-8B", "sglang")],
)
def test_the_default_engine_depends_on_the_model(model, engine):
    assert engine_for(model) == engine


def test_capabilities_of_replicas_depend_on_flags_other_engines_have_all():
    flags = ("--speech", "hibari", "--transcription", "off", "--threads", "2")
    assert set(engine_capabilities("replica", request_for("tiny", 1, "", *flags))) == {
        "chat", "streaming", "speech", "audio_output",
    }  # fmt: skip
    assert engine_capabilities("replica", request_for("tiny")) == ("chat", "streaming")
    assert engine_capabilities("llamacpp", request_for("smollm2-135m")) == ("chat", "streaming")
    assert engine_capabilities("vllm", request_for()) == CAPABILITIES


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
def test_each_replica_gets_its_own_ports(flags, changed):
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
def test_ports_in_the_json_of_engines_are_changed_too(config, endpoints):
    _, text = ports_apart(["--kv-events-config", json.dumps(config)], 2, 2)
    changed = json.loads(text)
    assert (changed["endpoint"], changed.get("replay_endpoint")) == endpoints
    assert {key: changed[key] for key in config if "endpoint" not in key} == {
        key: value for key, value in config.items() if "endpoint" not in key
    }


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_a_value_that_is_not_a_json_object_is_left_unchanged(text):
    assert ports_apart(["--kv-events-config", text], 0, 2) == ("--kv-events-config", text)


def test_ports_that_would_overlap_are_refused():
    flags = ["--kv-events", "tcp://*:5557", "--kv-replay", "tcp://*:5558"]
    assert ports_apart(flags, 0, 1)[1] == "tcp://*:{5557+index}"
    with pytest.raises(PortsOverlapError, match="ports 5557 and 5558 are too close for 2 replicas"):
        ports_apart(flags, 0, 2)
    with pytest.raises(PortsOverlapError, match="port 0"):
        ports_apart(flags, 1, 1)


def test_which_flags_make_an_engine_publish_events():
    assert publishes(["--x", "--kv-events=tcp://*:0"])
    assert publishes(["--kv-events-config", "{}"])
    assert not publishes(["--kv-replay", "tcp://*:0"])
