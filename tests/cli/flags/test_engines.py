import json

import pytest

from omni_proxy.cli.flags.engines import (
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

PLACE = ("--host", "{host}", "--port", "{port}")


def asked(model="org/model", size=1, name="", *flags):
    return EngineRequest(model, size, name, flags)


@pytest.mark.parametrize(
    ("engine", "of", "words"),
    [
        ("replica", asked("tiny"), "omni-proxy replica --model tiny"),
        ("replica", asked("tiny", 2), "omni-proxy replica --model tiny --tp 2"),
        ("replica", asked("/m/a", 1, "a"), "omni-proxy replica --model /m/a --model-name a"),
        ("llamacpp", asked("tiny"), "omni-proxy replica --model tiny --engine llamacpp"),
        ("llamacpp", asked("/m/a.gguf", 1, "a"), "llama-server --model /m/a.gguf --alias a"),
        ("sglang", asked(), "python3 -m sglang.launch_server --model-path org/model"),
        ("sglang", asked("m", 2), "python3 -m sglang.launch_server --model-path m --tp-size 2"),
        ("vllm", asked("m", 4), "vllm serve m --tensor-parallel-size 4"),
        ("vllm", asked(name="n"), "vllm serve org/model --served-model-name n"),
        ("omni", asked(name="m"), "sgl-omni serve --model-path org/model --model-name m"),
    ],
)  # fmt: skip
def test_each_engine_is_started_by_its_own_words(engine, of, words):
    assert engine_command(engine, of) == (*words.split(), *PLACE)


def test_the_engines_own_flags_stand_last_so_that_they_win():
    command = engine_command("vllm", asked("m", 1, "", "--port", "1", "--dtype", "half"))
    assert command[-4:] == ("--port", "1", "--dtype", "half")


@pytest.mark.parametrize(
    ("engine", "of", "cure"),
    [
        ("sglang", asked("tiny"), "leave --engine out"),
        ("vllm", asked("smollm2-135m"), "leave --engine out"),
        ("llamacpp", asked("smollm2-135m", 2), "--tp-size"),
        ("llamacpp", asked("m.gguf", 2), "--tp-size"),
        ("omni", asked("m", 2), "tp_size"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_the_cure(engine, of, cure):
    with pytest.raises(EngineCommandError, match=cure):
        engine_command(engine, of)


@pytest.mark.parametrize(
    ("engine", "of", "name"),
    [
        ("replica", asked("tiny"), "tiny"),
        ("llamacpp", asked("tiny"), "tiny"),
        ("replica", asked("/m/a.gguf"), "a.gguf"),
        ("sglang", asked("org/model"), ""),
        ("sglang", asked("org/model", 1, "m"), "m"),
    ],
)
def test_the_model_is_named_where_it_is_known(engine, of, name):
    assert model_name(engine, of) == name


def test_every_engine_has_its_words():
    assert set(ENGINES) == {"replica", "sglang", "vllm", "llamacpp", "omni"}


@pytest.mark.parametrize(
    ("model", "engine"),
    [("tiny", "replica"), ("/m/a.gguf", "replica"), ("meta-llama/Llama-3.1-8B", "sglang")],
)
def test_without_a_model_flag_the_engine_reports_the_model(model, engine):
    assert engine_for(model) == engine


def test_capabilities_of_replicas_follow_their_flags_others_are_open():
    flags = ("--speech", "hibari", "--transcription", "off", "--threads", "2")
    assert set(engine_capabilities("replica", asked("tiny", 1, "", *flags))) == {
        "chat", "streaming", "speech", "audio_output",
    }  # fmt: skip
    assert engine_capabilities("replica", asked("tiny")) == ("chat", "streaming")
    assert engine_capabilities("llamacpp", asked("smollm2-135m")) == ("chat", "streaming")
    assert engine_capabilities("vllm", asked()) == CAPABILITIES


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
